import Foundation
import Testing

@testable import MLXInferClient

struct CancellationTests {
    private static let begun: [FaultServer.Step] = [
        .read, .send(Transcript.stream(Array(Transcript.chatEvents.prefix(3)), end: false)), .hold,
    ]

    @Test func cancellingTheTaskClosesTheConnection() async throws {
        let server = try FaultServer(Self.begun)
        let task = Task { await gather(server.client.chat([.user("Hi")])) }
        #expect(await eventually { server.requests.count == 1 })
        task.cancel()
        let (_, error) = await task.value
        #expect(error == .cancelled)
        #expect(await eventually { server.departures.count == 1 })
    }

    @Test func theConnectionIsClosedAtOnce() async throws {
        let server = try FaultServer(Self.begun)
        var delays: [Duration] = []
        for round in 1...50 {
            let task = Task { await gather(server.client.chat([.user("Hi")])) }
            #expect(await eventually { server.requests.count == round })
            let start = ContinuousClock.now
            task.cancel()
            #expect(await eventually { server.departures.count == round })
            delays.append((server.departures.last ?? .now) - start)
        }
        delays.sort()
        print("from cancelling to the server's end of the connection: median \(delays[25]), longest \(delays[49])")
    }

    @Test func whatHadComeIsNotLost() async throws {
        let server = try FaultServer(Self.begun)
        var answer = ChatResponse()
        var events = server.client.chat([.user("Hi")]).makeAsyncIterator()
        while answer.text.isEmpty, let event = try await events.next() { answer.add(event) }
        #expect(answer.text == "Grü" && answer.finishReason == nil)
    }

    @Test func leavingTheLoopClosesTheConnection() async throws {
        let server = try FaultServer(Self.begun)
        try await { for try await event in server.client.chat([.user("Hi")]) where event == .text("Grü") { break } }()
        #expect(await eventually { server.departures.count == 1 })
    }

    @Test func aStreamThatNobodyReadsIsClosed() async throws {
        let server = try FaultServer(Self.begun)
        var events: AnswerEvents<ChatEvent>? = server.client.chat([.user("Hi")])
        #expect(await eventually { server.requests.count == 1 })
        #expect(events != nil)
        events = nil
        #expect(await eventually { server.departures.count == 1 })
    }

    @Test func wholeAnswersAreCancelled() async throws {
        let server = try FaultServer(Self.begun)
        for work in [{ _ = try await $0.respond(to: "Hi") }, { _ = try await $0.models() }] as [@Sendable (Client) async throws -> Void] {
            let before = server.requests.count
            let task = Task { try await work(server.client) }
            #expect(await eventually { server.requests.count == before + 1 })
            task.cancel()
            await #expect(throws: CancellationError.self) { try await task.value }
        }
        #expect(await eventually { server.departures.count == 2 })
    }

    @Test func aTaskThatIsCancelledAlreadySendsNothing() async throws {
        let server = try FaultServer(Self.begun)
        let task = Task {
            withUnsafeCurrentTask { $0?.cancel() }
            return try await server.client.models()
        }
        await #expect(throws: CancellationError.self) { try await task.value }
        #expect(server.requests.isEmpty)
    }

    @Test func waitingForAServerCanBeCancelled() async throws {
        let client = Client(.unix(path: FaultServer.freshPath()), reconnect: Reconnect(upTo: .seconds(1000), firstPause: .seconds(500)))
        let task = Task { try await client.models() }
        try await Task.sleep(for: .milliseconds(20))
        task.cancel()
        await #expect(throws: CancellationError.self) { try await task.value }
    }

    @Test func cancellingManyTimesLeavesNothingOpen() async throws {
        let server = try FaultServer(Self.begun)
        let before = try openDescriptors()
        for _ in 0..<100 {
            let task = Task { await gather(server.client.chat([.user("Hi")])) }
            await Task.yield()
            task.cancel()
            _ = await task.value
        }
        #expect(try await eventually { try openDescriptors() <= before + 20 })
    }
}
