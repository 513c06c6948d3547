import Foundation
import Testing

@testable import MLXInferClient

extension LiveTests.Restarting {
    @Test func requestsWaitForAServerThatRestarts() async throws {
        let server = LiveServer()
        let before = try await server.client.respond(to: "What is the capital of France?", options: LiveTests.exact)
        server.stop()
        var hasty = server.client
        hasty.reconnect = .never
        await #expect(throws: MLXInferError.serverNotRunning(server.path)) { try await hasty.models() }
        let client = server.client
        async let after = client.respond(to: "What is the capital of France?", options: LiveTests.exact)
        try await Task.sleep(for: .milliseconds(100))
        server.start()
        #expect(try await after.text == before.text)
    }

    @Test func anAnswerThatTheServersEndCutsOff() async throws {
        let server = LiveServer()
        var request = ChatRequest([.user("Tell me a long story.")], options: SamplingOptions(maxTokens: 1500))
        request.additionalFields = ["ignore_eos": true]
        var text = ""
        let error = await #expect(throws: MLXInferError.self) {
            for try await event in server.client.chat(request) {
                guard case .text(let piece) = event else { continue }
                if text.isEmpty { try server.kill() }
                text += piece
            }
        }
        #expect(error == .streamInterrupted(partial: text, reason: "the connection was closed in the middle of the answer"))
    }

    @Test func aKeyOnTCP() async throws {
        let file = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
        defer { try? FileManager.default.removeItem(at: file) }
        try Data("a-long-secret".utf8).write(to: file)
        let server = LiveServer(["--port", "0", "--api-key-file", file.path])
        try await server.client.waitUntilReady()
        let place = try #require(server.log.firstMatch(of: #/127\.0\.0\.1:(\d+)/#))
        let port = try #require(UInt16(place.1))
        let answer = try await Client(.tcp(port: port, apiKey: "a-long-secret")).respond(to: "Hi", options: LiveTests.exact)
        #expect(!answer.text.isEmpty)
        for key in [nil, "another-secret"] {
            let error = await gather(Client(.tcp(port: port, apiKey: key), model: LiveServer.model).chat([.user("Hi")])).error
            guard case .api(let refusal) = error else {
                Issue.record("\(String(describing: error))")
                continue
            }
            #expect(refusal.status == 401 && !refusal.message.isEmpty)
        }
    }
}
