import MLXInferClient
import SwiftUI

struct ChatView: View {
    @State private var conversation = Conversation()
    @State private var prompt = ""
    @State private var models: [Model] = []
    @State private var pictures: [ContentPart] = []

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
            conversation.send(prompt, pictures)
            (prompt, pictures) = ("", [])
        }
        .dropDestination(for: URL.self) { files, _ in
            pictures += files.compactMap { try? ContentPart(contentsOf: $0) }
            return true
        }
        Button("Stop") { conversation.stop() }.disabled(!conversation.isAnswering)
        Picker("Model", selection: Bindable(conversation).request.model) {
            Text("The server's first").tag(String?.none)
            ForEach(models) { Text($0.id).tag(String?.some($0.id)) }
        }
        .task { models = (try? await conversation.client.models()) ?? [] }
    }
}
