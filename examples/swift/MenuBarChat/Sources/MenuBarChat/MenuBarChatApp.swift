import AppKit
import MLXInferClient
import MenuBarChatModel
import SwiftUI

@main
struct MenuBarChatApp: App {
    @State private var model: ChatModel

    init() {
        let isSandboxed = ProcessInfo.processInfo.environment["APP_SANDBOX_CONTAINER_ID"] != nil
        let server = ServerCommand(isSandboxed: isSandboxed, container: FileManager.default.containerURL) { name in
            UserDefaults.standard.string(forKey: name) ?? Bundle.main.object(forInfoDictionaryKey: name) as? String
        }
        let model = ChatModel(server, folder: .applicationSupportDirectory.appending(path: "MenuBarChat"))
        _model = State(initialValue: model)
        Task {
            NSApplication.shared.setActivationPolicy(.accessory)  // LSUIElement of Info.plist, for `swift run`
            await model.run()
        }
    }

    var body: some Scene {
        MenuBarExtra("MenuBarChat", systemImage: model.isReady ? "bubble.left.fill" : "bubble.left") { Panel(model: model) }
            .menuBarExtraStyle(.window)
        Window("Conversations", id: "conversations") {
            NavigationSplitView {
                Sidebar(model: model)
            } detail: {
                ChatView(model: model)
            }
        }
    }
}

/// The selected conversation, under the icon in the menu bar.
struct Panel: View {
    var model: ChatModel
    @Environment(\.openWindow) private var openWindow

    var body: some View {
        VStack(spacing: 0) {
            ChatView(model: model)
            HStack {
                Button("New") { model.newChat() }
                Button("Conversations") {
                    openWindow(id: "conversations")
                    NSApplication.shared.activate()
                }
                Spacer()
                Button("Quit") { NSApplication.shared.terminate(nil) }
            }
            .padding(8)
        }
        .frame(width: 400, height: 520)
    }
}

struct Sidebar: View {
    @Bindable var model: ChatModel

    var body: some View {
        List(selection: $model.selection) {
            ForEach(model.chats) { chat in
                Label(chat.title, systemImage: chat.conversation.isAnswering ? "ellipsis.bubble" : "bubble.left")
                    .contextMenu { Button("Delete", role: .destructive) { model.remove(chat) } }
            }
        }
        .toolbar { Button("New", systemImage: "square.and.pencil") { model.newChat() } }
    }
}
