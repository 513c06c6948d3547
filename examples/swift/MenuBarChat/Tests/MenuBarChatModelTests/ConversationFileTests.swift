import Foundation
import MLXInferClient
import Testing

@testable import MenuBarChatModel

/// The sidebar and its files, without a server.
@MainActor struct ConversationFileTests {
    private func model(_ folder: URL) throws -> ChatModel {
        ChatModel(ServerCommand(["m"], socket: try freshFolder().appendingPathComponent("s").path, program: []), folder: folder)
    }

    private func stored(_ text: String, at seconds: Double) -> StoredChat {
        StoredChat(changed: Date(timeIntervalSinceReferenceDate: seconds), model: "m", messages: [.user(text), .assistant("yes")])
    }

    @Test func conversationsComeBackLatestFirst() throws {
        let store = ChatStore(folder: try freshFolder().appendingPathComponent("new"))
        #expect(store.load().chats.isEmpty)
        for (text, seconds) in [("one\nmore", 1.0), ("three", 3), ("two", 2)] { try store.save(stored(text, at: seconds)) }
        try Data("{".utf8).write(to: store.folder.appendingPathComponent("broken.json"))
        let model = try model(store.folder)
        #expect(model.chats.map(\.title) == ["three", "two", "one"] && model.selected?.title == "three")
        #expect(
            model.selected?.conversation.messages == [.user("three"), .assistant("yes")]
                && model.selected?.conversation.request.model == "m")
        #expect(model.problem == "not a conversation: broken.json")
        let size = try FileManager.default.attributesOfItem(atPath: store.folder.path)[.posixPermissions] as? Int
        #expect(size == 0o700)
    }

    @Test func aConversationIsRemovedWithItsFile() async throws {
        let store = ChatStore(folder: try freshFolder())
        for number in 1...3 { try store.save(stored("\(number)", at: Double(number))) }
        let model = try model(store.folder)
        let (last, middle, first) = (model.chats[0], model.chats[1], model.chats[2])
        model.selection = middle.id
        model.remove(middle)
        #expect(model.selected === first)
        model.remove(last)
        #expect(model.selected === first)
        model.remove(middle)
        model.remove(first)
        #expect(model.chats.map(\.title) == ["New conversation"] && model.selected != nil)
        await model.saving?.value
        #expect(store.load().chats.isEmpty && model.problem == nil)
    }

    @Test func oneEmptyConversationIsEnough() throws {
        let model = try model(freshFolder())
        model.newChat()
        #expect(model.chats.count == 1 && model.selected?.canSend == false)
        model.selected?.prompt = " \n"
        #expect(model.selected?.canSend == false)
        model.send()
        #expect(model.selected?.conversation.messages.isEmpty == true)
        model.selected?.prompt = "a draft"
        model.newChat()
        #expect(model.chats.count == 2 && model.selected?.prompt == "")
    }

    @Test func aMessageIsKeptIfThereIsNoServer() async throws {
        let folder = try freshFolder()
        try ChatStore(folder: folder).save(stored("old", at: 1))
        let model = try model(folder)
        model.newChat()
        let chat = try #require(model.selected)
        chat.prompt = "Hello"
        model.send()
        #expect(chat.prompt == "" && chat.title == "Hello" && model.chats.map(\.title) == ["Hello", "old"])
        await chat.conversation.settled()
        guard case .serverNotRunning = chat.conversation.failure else {
            Issue.record("\(String(describing: chat.conversation.failure))")
            return
        }
        await model.saving?.value
        #expect(ChatStore(folder: folder).load().chats.map(\.messages) == [[.user("Hello")], [.user("old"), .assistant("yes")]])
    }

    @Test func aFullDiskIsReported() async throws {
        let model = try model(freshFile("file", Data()).appendingPathComponent("below"))
        model.selected?.prompt = "Hello"
        model.send()
        await model.saving?.value
        #expect(model.problem?.hasPrefix("not saved: ") == true)
    }

    @Test func filesOfAMessage() throws {
        let model = try model(freshFolder())
        let chat = try #require(model.selected)
        let files = [try freshFile("a.bmp", bitmap), try freshFile("b.txt", Data("Grüße".utf8)), try freshFile("c", Data([1, 0, 2]))]
        model.attach(files)
        #expect(chat.attachments.map(\.name) == ["a.bmp", "b.txt"] && chat.attachments.map(\.isPicture) == [true, false])
        #expect(chat.attachments[1].part == .text("b.txt:\nGrüße\n") && chat.canSend)
        #expect(model.problem?.contains("c is not a picture") == true)
        model.attach([files[0].deletingLastPathComponent(), try freshFile("long.txt", Data(repeating: 65, count: 200_001))])
        #expect(chat.attachments.count == 2 && model.problem?.contains("long.txt is not a picture") == true)
    }

    @Test func settings() {
        let group = URL(fileURLWithPath: "/Users/me/Library/Group Containers/ABCDE12345.chat")
        func command(_ settings: [String: String], isSandboxed: Bool = false) -> ServerCommand {
            let container: (String) -> URL? = { $0 == "ABCDE12345.chat" ? group : nil }
            return ServerCommand(isSandboxed: isSandboxed, container: container) { settings[$0] }
        }
        let plain = command([:])
        #expect(plain.models == ["smollm2"] && plain.socket == nil)
        let own = command(["Models": "a b", "Program": "/opt/mlxinfer"])
        #expect(own.models == ["a", "b"] && own.program == ["/opt/mlxinfer"])
        let sandboxed = command(["AppGroup": "ABCDE12345.chat", "Program": "/opt/mlxinfer"], isSandboxed: true)
        #expect(sandboxed.program.isEmpty && sandboxed.socket == group.path + "/mlxinfer/api.sock")
    }
}
