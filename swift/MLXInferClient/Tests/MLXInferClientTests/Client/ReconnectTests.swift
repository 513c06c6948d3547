import Foundation
import Testing

@testable import MLXInferClient

struct ReconnectTests {
    @Test func aServerThatStartsLater() async throws {
        let path = FaultServer.freshPath()
        let client = Client(.unix(path: path), model: "tiny", reconnect: Reconnect(upTo: .seconds(30), firstPause: .milliseconds(2)))
        async let answer = client.respond(to: "Hi")
        try await Task.sleep(for: .milliseconds(30))
        let server = try FaultServer([.read, .send(Transcript.chat)], path: path)
        #expect(try await answer.text == "Grüße 🙂" && server.requests.count == 1)
    }

    @Test func aServerThatGoesAwayBeforeItAnswers() async throws {
        let server = try FaultServer([.read], [.read, .send(Transcript.chat)])
        var client = server.client
        client.reconnect = Reconnect(upTo: .seconds(30), firstPause: .milliseconds(2))
        #expect(try await client.respond(to: "Hi").text == "Grüße 🙂")
        #expect(server.requests.count == 2)
    }

    @Test func aRequestIsNotSentAThirdTime() async throws {
        let server = try FaultServer([.read])
        var client = server.client
        client.reconnect = Reconnect(upTo: .seconds(30), firstPause: .milliseconds(2))
        guard case .streamInterrupted("", _) = await gather(client.chat([.user("Hi")])).error else {
            Issue.record("not interrupted")
            return
        }
        #expect(server.requests.count == 2)
    }

    @Test(arguments: [1, 20, 200, 400])
    func aRequestThatWasAnsweredInPartIsNotSentAgain(_ count: Int) async throws {
        let server = try FaultServer([.read, .send(Array(Transcript.chat.prefix(count)))], [.read, .send(Transcript.chat)])
        var client = server.client
        client.reconnect = Reconnect(upTo: .seconds(30), firstPause: .milliseconds(2))
        guard case .streamInterrupted = await gather(client.chat([.user("Hi")])).error else {
            Issue.record("not interrupted")
            return
        }
        #expect(server.requests.count == 1)
    }

    @Test func errorsOfTheServerAreNotRetried() async throws {
        let busy = Transcript.json(#"{"error":{"message":"busy"}}"#, status: "503 Service Unavailable")
        let server = try FaultServer([.read, .send(busy)], [.read, .send(Transcript.chat)])
        var client = server.client
        client.reconnect = Reconnect(upTo: .seconds(30), firstPause: .milliseconds(2))
        await #expect(throws: MLXInferError.api(APIError(status: 503, message: "busy"))) { try await client.respond(to: "Hi") }
        #expect(server.requests.count == 1)
    }

    @Test func readinessIsWaitedFor() async throws {
        let path = FaultServer.freshPath()
        async let ready: Void = Client(.unix(path: path), reconnect: Reconnect(upTo: .zero, firstPause: .milliseconds(2))).waitUntilReady()
        try await Task.sleep(for: .milliseconds(20))
        let server = try FaultServer([.read, .send(Transcript.json(#"{"status":"ok"}"#))], path: path)
        try await ready
        #expect(server.requests.count == 1)
    }
}
