// The view of docs/swift.md and of the package's README, as Snippets.swift has the rest of their Swift.

#if canImport(SwiftUI)
    import MLXInferClient
    import SwiftUI

    struct ChatView: View {
        @State private var conversation = Conversation()
        @State private var prompt = ""

        var body: some View {
            VStack(alignment: .leading) {
                ScrollView {
                    ForEach(Array(conversation.messages.enumerated()), id: \.offset) { Text($0.element.content) }
                    if let answer = conversation.answer { Text(answer.text) }
                }
                if let failure = conversation.failure {
                    Text(failure.localizedDescription).foregroundStyle(.red)
                    Button("Try again") { conversation.retry() }
                }
                TextField("Ask", text: $prompt).onSubmit { conversation.send(prompt) }
                Button("Stop") { conversation.stop() }.disabled(!conversation.isAnswering)
            }
        }
    }
#endif
