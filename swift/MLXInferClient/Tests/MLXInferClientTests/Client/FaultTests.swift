import Foundation
import Testing

@testable import MLXInferClient

struct FaultTests {
    @Test func anAnswerByteByByte() async throws {
        let server = try FaultServer([.read, .drip(Transcript.chat)])
        let (events, error) = await gather(server.client.chat([.user("Hi")]))
        #expect(events == Transcript.chatMeaning && error == nil)
    }

    @Test func anAnswerInTwoHalvesAtEveryPlace() async throws {
        let bytes = Transcript.chat
        let server = try FaultServer([.read, .send(bytes)])
        for place in stride(from: 1, to: bytes.count, by: 7) {
            let split = try FaultServer([.read, .send(Array(bytes[..<place])), .pause(.milliseconds(1)), .send(Array(bytes[place...]))])
            #expect(await gather(split.client.chat([.user("Hi")])).events == Transcript.chatMeaning, "at \(place)")
        }
        #expect(await gather(server.client.chat([.user("Hi")])).events == Transcript.chatMeaning)
    }

    @Test func aConnectionThatIsClosedAtEveryPlace() async throws {
        let bytes = Transcript.chat
        let needed = bytes.count - "\r\n0\r\n\r\n".utf8.count
        for count in Array(stride(from: 0, to: needed, by: 5)) + [needed - 1] {
            let server = try FaultServer([.read, .send(Array(bytes.prefix(count)))])
            let (events, error) = await gather(server.client.chat([.user("Hi")]))
            let partial = events.map { if case .text(let piece) = $0 { piece } else { "" } }.joined()
            guard case .streamInterrupted(partial, _) = error else {
                Issue.record("closed behind \(count) bytes: \(String(describing: error))")
                continue
            }
        }
    }

    @Test(arguments: ["SSH-2.0-OpenSSH_9.9\r\n", "\u{0}\u{1}\u{2}\n", "HTTP/1.1 2000 OK\r\n\r\n", "<html></html>\r\n", "{}\n"])
    func garbage(_ text: String) async throws {
        let server = try FaultServer([.read, .send(text.bytes), .hold])
        guard case .protocolViolation = await gather(server.client.chat([.user("Hi")])).error else {
            Issue.record("no violation")
            return
        }
    }

    @Test func noise() async throws {
        var dice = Dice(seed: 1)
        for _ in 0..<30 {
            let bytes = (0..<2000).map { _ in UInt8.random(in: 0...255, using: &dice) }
            let server = try FaultServer([.read, .send(bytes)])
            let (events, error) = await gather(server.client.chat([.user("Hi")]))
            #expect(events.isEmpty && error != nil)
        }
    }

    @Test func aStreamWithFlippedBytesNeverHangsNorCrashes() async throws {
        var dice = Dice(seed: 2)
        for _ in 0..<2000 {
            var bytes = Transcript.chat
            for _ in 0..<3 { bytes[Int.random(in: 0..<bytes.count, using: &dice)] = UInt8.random(in: 0...255, using: &dice) }
            let outcome = Outcome(StreamedAnswer(ChatStream()), bytes)
            #expect(outcome.isComplete || outcome.failure != nil)
        }
    }

    @Test func theWrongContentType() async throws {
        let server = try FaultServer([.read, .send(Transcript.stream(["<html>"], type: "text/html")), .hold])
        let expected = MLXInferError.protocolViolation("a stream of events was asked for, and text/html came")
        #expect(await gather(server.client.chat([.user("Hi")])).error == expected)
    }

    @Test func headersWithoutEnd() async throws {
        let server = try FaultServer([.read, .send("HTTP/1.1 200 OK\r\nA: ".bytes + [UInt8](repeating: 120, count: 1 << 20)), .hold])
        #expect(await gather(server.client.chat([.user("Hi")])).error == .protocolViolation("a line longer than 16384 bytes"))
    }

    @Test func anEventWithoutEnd() async throws {
        let bytes = Transcript.stream(["data: ", String(repeating: "x", count: 5 << 20)], end: false)
        let server = try FaultServer([.read, .send(bytes), .hold])
        #expect(
            await gather(server.client.chat([.user("Hi")])).error == .protocolViolation("a line of the stream has more than 4194304 bytes"))
    }

    @Test func aServerThatSaysContinueFirst() async throws {
        let server = try FaultServer([
            .read, .send("HTTP/1.1 100 Continue\r\n\r\n".bytes), .pause(.milliseconds(5)), .send(Transcript.chat),
        ])
        #expect(await gather(server.client.chat([.user("Hi")])).events == Transcript.chatMeaning)
    }

    @Test func deepJSON() async throws {
        let deep = String(repeating: "[", count: 100_000)
        let server = try FaultServer([.read, .send(Transcript.json(deep))])
        await #expect(throws: MLXInferError.self) { try await server.client.models() }
        let error = try FaultServer([.read, .send(Transcript.json(#"{"error":\#(deep)"#, status: "500 x"))])
        await #expect(throws: MLXInferError.self) { try await error.client.models() }
        let nested = String(repeating: "[", count: 400) + String(repeating: "]", count: 400)
        let valid = try FaultServer([.read, .send(Transcript.json(#"{"error":\#(nested)}"#, status: "500 x"))])
        await #expect(throws: MLXInferError.self) { try await valid.client.models() }
    }

    @Test func silence() async throws {
        let server = try FaultServer([.read, .send(Transcript.stream(Array(Transcript.chatEvents.prefix(3)), end: false)), .hold])
        var client = server.client
        client.timeouts.silence = .seconds(1)
        #expect(await gather(client.chat([.user("Hi")])).error == .timedOut(.answer, partial: "Grü"))
        client.timeouts = Timeouts(silence: .seconds(10), wholeAnswer: .seconds(1))
        #expect(await gather(client.chat([.user("Hi")])).error == .timedOut(.wholeAnswer, partial: "Grü"))
    }

    @Test func aServerThatReadsNothing() async throws {
        let server = try FaultServer([.pause(.seconds(3))])
        var client = server.client
        client.timeouts.silence = .milliseconds(50)
        let error = await gather(client.chat([.user(String(repeating: "long ", count: 1 << 20))])).error
        #expect(error == .timedOut(.sending, partial: ""))
    }

    @Test func aRefusalBeforeTheRequestWasRead() async throws {
        let refusal = Transcript.json(#"{"error":{"message":"too large","type":"invalid_request_error"}}"#, status: "413 Content Too Large")
        let server = try FaultServer([.send(refusal)])
        let error = await gather(server.client.chat([.user(String(repeating: "long ", count: 1 << 20))])).error
        #expect(error == .api(APIError(status: 413, type: "invalid_request_error", message: "too large")))
    }
}
