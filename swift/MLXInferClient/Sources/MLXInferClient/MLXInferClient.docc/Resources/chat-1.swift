import MLXInferClient
import SwiftUI

struct ChatView: View {
    @State private var conversation = Conversation()

    var body: some View {
        ScrollView {
            VStack(alignment: .leading) {
                ForEach(Array(conversation.messages.enumerated()), id: \.offset) { Text($0.element.content) }
                if let answer = conversation.answer { Text(answer.text) }
            }
        }
    }
}
