import MLXInferClient
import SwiftUI

struct ChatView: View {
    @State private var conversation = Conversation()
    @State private var prompt = ""

    var body: some View {
        ScrollView {
            VStack(alignment: .leading) {
                ForEach(Array(conversation.messages.enumerated()), id: \.offset) { Text($0.element.content) }
                if let answer = conversation.answer { Text(answer.text) }
                if let failure = conversation.failure {
                    Text(failure.localizedDescription).foregroundStyle(.red)
                    Button("Try again") { conversation.retry() }
                }
            }
        }
        TextField("Ask", text: $prompt).onSubmit {
            conversation.send(prompt)
            prompt = ""
        }
        Button("Stop") { conversation.stop() }.disabled(!conversation.isAnswering)
    }
}
