import MLXInferClient
import SwiftUI

struct ChatView: View {
    @State private var conversation = Conversation()

    var body: some View {
        ScrollView {
            VStack(alignment: .leading) {
                ForEach(conversation.messages.indices, id: \.self) { Text(conversation.messages[$0].content) }
                if let answer = conversation.answer { Text(answer.text) }
            }
        }
    }
}
