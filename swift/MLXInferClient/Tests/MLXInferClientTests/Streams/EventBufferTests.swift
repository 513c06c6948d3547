import Foundation
import Testing

@testable import MLXInferClient

struct EventBufferTests {
    @Test func slowReadersGetEverythingInFewEvents() async throws {
        let buffer = EventBuffer<ChatEvent>.events()
        let pieces = (0..<4000).map { "\($0) " }
        for piece in pieces {
            buffer.add(.text(piece))
            buffer.add(.logprobs([TokenLogprob(chosen: .init(token: piece, logprob: 0))]))
        }
        buffer.add(.finished(.stop))
        buffer.finish()
        #expect(buffer.count < 260)
        var answer = ChatResponse()
        while let event = try await buffer.next() { answer.add(event) }
        #expect(answer.text == pieces.joined() && answer.logprobs.map(\.chosen.token) == pieces && answer.finishReason == .stop)
    }

    @Test func piecesOfCallsKeepTheirPlaces() async throws {
        let buffer = EventBuffer<ChatEvent>.events()
        for index in 0..<2 { buffer.add(.toolCallDelta(ToolCallDelta(index: index, id: "\(index)", name: "f\(index)"))) }
        for step in 0..<2000 { buffer.add(.toolCallDelta(ToolCallDelta(index: step % 2, arguments: "\(step % 2)"))) }
        buffer.add(.toolCallDelta(ToolCallDelta(index: 2, id: "2", name: "f2")))
        buffer.finish()
        #expect(buffer.count < 260)
        var answer = ChatResponse()
        while let event = try await buffer.next() { answer.add(event) }
        #expect(answer.toolCalls.map(\.name) == ["f0", "f1", "f2"])
        #expect(answer.toolCalls.map(\.arguments) == [String(repeating: "0", count: 1000), String(repeating: "1", count: 1000), ""])
    }

    @Test func theNewestSnapshotIsKept() async throws {
        let buffer = EventBuffer<Snapshot<[Int]>>.newest()
        for count in 0...1000 { buffer.add(Snapshot(content: Array(0..<count), value: nil, response: ChatResponse())) }
        buffer.finish()
        #expect(buffer.count == 1)
        #expect(try await buffer.next()?.content.count == 1000)
        #expect(try await buffer.next() == nil)
    }

    @Test func theEndIsThrownOnce() async throws {
        let buffer = EventBuffer<Int>(limit: 1) { _, _ in false }
        buffer.add(1)
        buffer.add(2)
        buffer.finish(.failure(MLXInferError.other("end")))
        buffer.finish()
        buffer.add(3)
        #expect(try await [buffer.next(), buffer.next()] == [1, 2])
        await #expect(throws: MLXInferError.other("end")) { try await buffer.next() }
        #expect(try await buffer.next() == nil)
    }

    @Test func stoppingReachesTheSourceOnce() async throws {
        let stops = Locked(0)
        var events: AnswerEvents<Int>? = AnswerEvents(EventBuffer(limit: 1) { _, _ in false }) { _ in { stops.withLock { $0 += 1 } } }
        var iterator = events?.makeAsyncIterator()
        events = nil
        #expect(stops.withLock { $0 } == 0 && iterator != nil)
        iterator = nil
        #expect(stops.withLock { $0 } == 1)
    }

    @Test func manyReadersAreAllServed() async throws {
        let buffer = EventBuffer<Int>(limit: 1000) { _, _ in false }
        let sum = try await withThrowingTaskGroup(of: Int.self) { group in
            for _ in 0..<8 {
                group.addTask {
                    var sum = 0
                    while let element = try await buffer.next() { sum += element }
                    return sum
                }
            }
            for number in 1...1000 { buffer.add(number) }
            buffer.finish()
            return try await group.reduce(0, +)
        }
        #expect(sum == 500_500)
    }

    @Test func aServerIsNotHeldUpByAReaderThatDoesNotRead() async throws {
        let piece = Transcript.delta(#"{"content":"0123456789"}"#)
        let bytes = Transcript.stream(Array(repeating: piece, count: 5000) + [Transcript.delta("{}", finish: #""stop""#), Transcript.done])
        let server = try FaultServer([.read, .send(bytes), .hold])
        let events = server.client.chat([.user("Hi")])
        #expect(await eventually { server.departures.count == 1 })  // all of it was sent, and the client has closed the connection
        #expect(events.waiting < 300)
        #expect(try await ChatResponse(collecting: events).text.utf8.count == 50_000)
    }
}
