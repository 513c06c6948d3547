import Foundation
import MLXInferClient
import Testing

@testable import MenuBarChatModel

/// The app's life with the real server.
@Suite(.serialized, .enabled(if: serverProgram != nil, "MLXINFER_COMMAND is not set"), .timeLimit(.minutes(3)))
@MainActor struct ServerTests {
    private func model(_ socket: String, _ folder: URL, program: [String]? = serverProgram, serving: String = "smollm2") -> ChatModel {
        ChatModel(ServerCommand([serving], socket: socket, program: program), folder: folder) { _ in }
    }

    @Test func aPictureForAModelThatSees() async throws {
        let repository = URL(fileURLWithPath: #filePath).pathComponents.dropLast(6).dropFirst().reduce("") { "\($0)/\($1)" }
        let (socket, folder) = (try freshFolder().appendingPathComponent("s").path, try freshFolder())
        let app = model(socket, folder, serving: "eyes=\(repository)/tests/golden/vision/smolvlm")
        let running = Task { await app.run() }
        #expect(await eventually { app.isReady && app.models.first?.seesImages == true })
        let chat = try #require(app.selected)
        chat.conversation.request.options = SamplingOptions(maxTokens: 4)
        app.attach([try freshFile("dot.bmp", bitmap)])
        app.send()
        #expect(chat.title == "Pictures")
        await chat.conversation.settled()
        #expect(chat.conversation.failure == nil && (chat.conversation.usage?.imageTokens ?? 0) > 0)
        await app.saving?.value
        let stored = try #require(ChatStore(folder: folder).load().chats.first)
        #expect(stored.messages.first == .user([.attachment(data: bitmap, mimeType: "image/bmp")]))
        running.cancel()
        await running.value
    }

    @Test func aDayOfTheApp() async throws {
        let (socket, folder) = (try freshFolder().appendingPathComponent("s").path, try freshFolder())
        let sandboxed = model(socket, try freshFolder(), program: [])
        let following = Task { await sandboxed.run() }
        #expect(await eventually { if case .failed = sandboxed.server { true } else { false } })
        #expect(sandboxed.status.hasSuffix("In Terminal: mlxinfer serve smollm2 --socket '\(socket)'"))

        let app = model(socket, folder)
        let running = Task { await app.run() }
        #expect(await eventually { app.isReady && !app.models.isEmpty })
        #expect(app.status == "Server of this app" && app.models.map(\.id) == ["smollm2"])
        #expect(await eventually { sandboxed.isReady })
        #expect(sandboxed.status == "Server at \(socket)")

        let chat = try #require(app.selected)
        chat.conversation.request.options = SamplingOptions(maxTokens: 24, temperature: 0)
        app.attach([try freshFile("dot.bmp", bitmap)])
        chat.prompt = "What is the capital of France?"
        app.send()
        #expect(app.problem?.contains("smollm2 does not see pictures: remove dot.bmp") == true && chat.conversation.messages.isEmpty)
        chat.attachments = []
        app.send()
        #expect(chat.conversation.isAnswering && chat.prompt == "" && app.problem == nil)
        await chat.conversation.settled()
        #expect(chat.conversation.messages.last?.content.contains("Paris") == true)

        app.attach([try freshFile("note.txt", Data("The code is 7421.".utf8))])
        chat.prompt = "What is the code?"
        app.send()
        await chat.conversation.settled()
        #expect(chat.conversation.failure == nil && chat.conversation.messages.count == 4)
        app.retry()
        await chat.conversation.settled()
        #expect(chat.conversation.messages.count == 4)

        chat.conversation.request.options = SamplingOptions(maxTokens: 1500)
        chat.conversation.request.additionalFields = ["ignore_eos": true]
        chat.prompt = "Tell me a long story."
        app.send()
        #expect(await eventually { (chat.conversation.answer?.text.count ?? 0) > 20 })
        chat.conversation.stop()
        #expect(!chat.conversation.isAnswering && chat.conversation.messages.count == 6)
        chat.conversation.request.model = "no-such-model"
        chat.prompt = "Hello?"
        app.send()
        await chat.conversation.settled()
        #expect(chat.conversation.failure?.localizedDescription.contains("no-such-model") == true)

        #expect(await eventually { ChatStore(folder: folder).load().chats.first?.messages == chat.conversation.messages })
        let again = model(socket, folder)
        #expect(
            again.chats.map(\.title) == ["What is the capital of France?"] && again.selected?.conversation.request.model == "no-such-model")
        running.cancel()
        await running.value
        following.cancel()
        await following.value
        #expect(await !Client(.unix(path: socket)).isReady())
    }
}
