import Foundation
import Testing

@testable import MLXInferClient

/// What an app does that has a server of its own.
extension LiveTests.App {
    private func command() -> ServerCommand {
        ServerCommand([LiveServer.model], socket: LiveServer.freshSocket(), program: LiveServer.command)
    }

    @Test func aServerThatIsStartedWatchedAndStopped() async throws {
        let log = Log()
        let server = LocalServer(command(), restart: .init(firstPause: .milliseconds(300))) { log.add($0) }
        let states = Task {
            var seen: [LocalServer.State] = []
            for await state in await server.states() {
                seen.append(state)
                if seen.count > 1, state == .stopped { break }
            }
            return seen
        }
        try await server.start()
        #expect(await server.state == .ready(ours: true) && log.lines.contains { $0.contains("ready on") })
        #expect(try await server.client.respond(to: "What is the capital of France?", options: LiveTests.exact).text.contains("Paris"))
        let other = LocalServer(server.command)
        try await other.start()
        #expect(await other.state == .ready(ours: false))
        await other.stop()
        try LiveServer.endChild(withSocket: server.command.endpoint.description)
        #expect(await eventually { if case .restarting = await server.state { true } else { false } })
        try await server.client.waitUntilReady()
        #expect(await eventually { await server.state == .ready(ours: true) })
        #expect(try await server.client.respond(to: "Hi", options: LiveTests.exact).finishReason != nil)
        await server.stop()
        #expect(await !server.client.isReady())
        #expect(await server.state == .stopped)
        let seen = await states.value
        #expect(seen.first == .stopped && seen.dropFirst().first == .starting && seen.contains(.ready(ours: true)))
    }

    @Test func aMistakeComesWithTheServersWords() async throws {
        var command = command()
        command.models = ["no-such-model"]
        let error = await #expect(throws: MLXInferError.self) { try await LocalServer(command) { _ in }.start() }
        guard case .serverEnded(_, let words) = error else {
            Issue.record("\(String(describing: error))")
            return
        }
        #expect(words.contains("no-such-model"))
    }

    #if canImport(Observation)
        @Test @MainActor func aConversation() async throws {
            let conversation = Conversation(LiveServer.shared.client)
            conversation.request.options = LiveTests.exact
            conversation.send("What is the capital of France?")
            await conversation.settled()
            #expect(conversation.messages.last?.content.contains("Paris") == true && conversation.failure == nil)
            conversation.request.options = SamplingOptions(maxTokens: 1500)
            conversation.request.additionalFields = ["ignore_eos": true]
            conversation.send("Tell me a long story.")
            #expect(await eventually { (conversation.answer?.text.count ?? 0) > 20 })
            conversation.stop()
            #expect(conversation.messages.count == 4 && conversation.failure == nil)
            #expect(try await eventually { try await LiveServer.shared.metric("mlxinfer_num_requests_running") == 0 })
        }
    #endif

    @Test func modelsComeAndGo() async throws {
        let server = LocalServer(command()) { _ in }
        try await server.start()
        let client = server.client
        #expect(try await client.models().map(\.state) == [.loaded])
        let count = try await client.countTokens([.system("Be brief."), .user("Hi")])
        #expect(try await client.respond(to: [.system("Be brief."), .user("Hi")], options: LiveTests.exact).usage?.promptTokens == count)
        try await client.unload(LiveServer.model)
        #expect(try await eventually { try await client.models().map(\.state) == [.unloaded] })
        try await client.load(LiveServer.model)
        #expect(try await eventually { try await client.models().map(\.state) == [.loaded] })
        let error = await #expect(throws: MLXInferError.self) { try await client.embed(["Hello"]) }
        guard case .api(let refusal) = error else {
            Issue.record("\(String(describing: error))")
            return
        }
        #expect(refusal.status == 400)
        await server.stop()
    }
}

extension LiveServer {
    /// Kills the server that listens at a socket, as a crash would.
    static func endChild(withSocket path: String) throws {
        let killer = Process()
        killer.executableURL = URL(fileURLWithPath: "/bin/sh")
        killer.arguments = [
            "-c", "for n in $(pgrep -f -- '--socket \(path)'); do test \"$(ps -o comm= -p $n)\" = sh || kill -KILL $n; done",
        ]
        try killer.run()
        killer.waitUntilExit()
    }
}
