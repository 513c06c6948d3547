import AppKit
import MLXInferClient
import MenuBarChatModel
import SwiftUI
import UniformTypeIdentifiers

/// A conversation: the server's state, the messages, and the message that is being written.
struct ChatView: View {
    var model: ChatModel

    var body: some View {
        VStack(alignment: .leading, spacing: 8) {
            HStack {
                Text(model.status).font(.caption).foregroundStyle(.secondary).textSelection(.enabled)
                Spacer()
                if case .failed = model.server { Button("Connect") { model.connect() } }
            }
            if let chat = model.selected {
                ScrollView { MessagesView(conversation: chat.conversation, retry: model.retry) }.defaultScrollAnchor(.bottom)
                ComposerView(model: model, chat: chat)
            }
            if let problem = model.problem {
                Text(problem).font(.caption).foregroundStyle(.red).onTapGesture { model.problem = nil }
            }
        }
        .padding()
        .dropDestination(for: URL.self) { files, _ in
            model.attach(files)
            return true
        }
    }
}

struct MessagesView: View {
    var conversation: Conversation
    var retry: @MainActor () -> Void

    var body: some View {
        VStack(alignment: .leading, spacing: 12) {
            ForEach(Array(conversation.messages.enumerated()), id: \.offset) { MessageView(message: $0.element) }
            if let answer = conversation.answer { MessageView(message: answer.message) }
            if let failure = conversation.failure {
                Text(failure.localizedDescription).foregroundStyle(.red)
                Button("Try again", action: retry)
            }
        }
        .frame(maxWidth: .infinity, alignment: .leading)
    }
}

struct MessageView: View {
    var message: Message

    var body: some View {
        VStack(alignment: .leading, spacing: 4) {
            ForEach(Array(message.parts.enumerated()), id: \.offset) { part in
                if case .attachment(let data, _, _) = part.element, let picture = NSImage(data: data) {
                    Image(nsImage: picture).resizable().scaledToFit().frame(maxHeight: 120)
                }
            }
            if let reasoning = message.reasoning { DisclosureGroup("Thoughts") { Text(reasoning).foregroundStyle(.secondary) } }
            Text(message.content).textSelection(.enabled)
        }
        .padding(8)
        .background(message.role == .user ? Color.accentColor.opacity(0.15) : Color.clear, in: RoundedRectangle(cornerRadius: 8))
    }
}

struct ComposerView: View {
    var model: ChatModel
    @Bindable var chat: Chat
    @State private var isChoosing = false

    var body: some View {
        VStack(alignment: .leading) {
            ForEach(chat.attachments) { attachment in
                Button(attachment.name, systemImage: "xmark.circle") { chat.attachments.removeAll { $0.id == attachment.id } }
            }
            HStack {
                Button("Attach", systemImage: "paperclip") { isChoosing = true }.labelStyle(.iconOnly)
                TextField("Ask", text: $chat.prompt, axis: .vertical).lineLimit(1...6).onSubmit { model.send() }
                if chat.conversation.isAnswering {
                    Button("Stop", systemImage: "stop.fill") { chat.conversation.stop() }.keyboardShortcut(".")
                } else {
                    Button("Send", systemImage: "paperplane") { model.send() }.disabled(!chat.canSend || !model.isReady)
                }
            }
            Picker("Model", selection: Bindable(chat.conversation).request.model) {
                Text("The server's first").tag(String?.none)
                ForEach(model.models) { Text($0.seesImages ? "\($0.id) (sees pictures)" : $0.id).tag(String?.some($0.id)) }
            }
        }
        .fileImporter(isPresented: $isChoosing, allowedContentTypes: [.image, .text], allowsMultipleSelection: true) { result in
            guard case .success(let files) = result else { return }
            let opened = files.filter { $0.startAccessingSecurityScopedResource() }  // in the sandbox
            model.attach(files)
            for file in opened { file.stopAccessingSecurityScopedResource() }
        }
    }
}
