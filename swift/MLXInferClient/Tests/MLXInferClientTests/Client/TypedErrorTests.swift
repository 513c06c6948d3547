import Testing

@testable import MLXInferClient

struct TypedErrorTests {
    private static let begun: [FaultServer.Step] = [
        .read, .send(Transcript.stream(Array(Transcript.chatEvents.prefix(3)), end: false)), .hold,
    ]

    @Test func aCancelledStreamIsSwiftsOwnError() async throws {
        let server = try FaultServer(Self.begun)
        let (plain, typed) = (server.client.chat([.user("Hi")]), server.client.chat([.user("Hi")]).typed)
        let first = Task { for try await _ in plain {} }
        let second = Task { for try await _ in typed {} }
        #expect(await eventually { server.requests.count == 2 })
        first.cancel()
        second.cancel()
        await #expect(throws: CancellationError.self) { try await first.value }
        await #expect(throws: MLXInferError.cancelled) { try await second.value }
    }

    @Test func oneTypeOfErrors() async throws {
        let server = try FaultServer([.read, .send(Transcript.json(#"{"error":{"message":"busy"}}"#, status: "503 x"))])
        do throws(MLXInferError) {
            _ = try await server.client.typed { try await $0.respond(to: "Hi") }
            Issue.record("no error")
        } catch {
            guard case .api(let refusal) = error else {
                Issue.record("\(error)")
                return
            }
            #expect(refusal.status == 503)
        }
        let held = try FaultServer(Self.begun)
        let client = held.client
        let task = Task { try await client.typed { try await $0.respond(to: "Hi") } }
        #expect(await eventually { held.requests.count == 1 })
        task.cancel()
        await #expect(throws: MLXInferError.cancelled) { try await task.value }
        struct Own: Error {}
        await #expect(throws: MLXInferError.other("Own()")) { try await client.typed { _ in throw Own() } }
    }

    @Test func eventsOfATypedStream() async throws {
        let server = try FaultServer([.read, .send(Transcript.chat)])
        var events: [ChatEvent] = []
        for try await event in server.client.chat([.user("Hi")]).typed { events.append(event) }
        #expect(events == Transcript.chatMeaning)
    }

    @Test func tooLong() {
        let error = MLXInferError.api(APIError(status: 400, code: "context_length_exceeded", message: "too long"))
        #expect(error.isTooLong && !MLXInferError.api(APIError(status: 400, message: "x")).isTooLong && !MLXInferError.cancelled.isTooLong)
    }
}
