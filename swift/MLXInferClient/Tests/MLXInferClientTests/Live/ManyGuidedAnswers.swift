import Foundation
import Testing

@testable import MLXInferClient

/// A type whose answers are short, so that many can be made.
struct Ticket: GuidedObject, Decodable, Sendable {
    enum Kind: String, GuidedChoice, Decodable { case bus, train, trainAndBus }

    struct Seat: GuidedObject, Decodable, Sendable {
        let row: Int
        let window: Bool
        static var properties: [Property<Seat>] {
            Property("row", \.row, .integer(in: 1...40))
            Property("window", \.window)
        }
    }

    let to: String
    let kind: Kind
    let price: Double
    let seats: [Seat]
    let note: String?

    static var properties: [Property<Ticket>] {
        Property("to", \.to, .string(maxLength: 12))
        Property("kind", \.kind)
        Property("price", \.price, .number(in: 1...99))
        Property("seats", \.seats, .array(of: Seat.jsonSchema, count: 1...2))
        Property("note", \.note, .string(maxLength: 16))
    }
}

extension Ticket {
    static func request(_ seed: Int) -> ChatRequest {
        let prompt = "Invent a ticket number \(seed). Answer as JSON with to, kind, price, seats and note."
        return ChatRequest([.user(prompt)], options: SamplingOptions(maxTokens: 200, temperature: 1, seed: seed))
    }

    /// What was seen of an answer.
    struct Seen {
        var (answers, snapshots, tokens) = (0, 0, 0)
    }

    /// Asks for an answer of a seed, and checks it and each of its snapshots.
    private static func check(_ seed: Int, _ client: Client) async throws -> Seen {
        var (seen, last) = (Seen(), Snapshot<Ticket>?.none)
        for try await snapshot in client.stream(Ticket.self, request(seed)) {
            if let last { #expect(snapshot.content.json.continues(last.content.json), "seed \(seed): \(snapshot.response.text)") }
            last = snapshot
            seen.snapshots += 1
        }
        let (ticket, content) = (try #require(last?.value, "seed \(seed)"), try #require(last?.content))
        #expect(content.to == ticket.to && content.kind == ticket.kind && content.price == ticket.price && content.note == ticket.note)
        #expect(content.seats?.map(\.row) == ticket.seats.map(\.row) && content.seats?.map(\.window) == ticket.seats.map(\.window))
        seen.tokens = last?.response.usage?.completionTokens ?? 0
        seen.answers = 1
        return seen
    }

    /// Checks answers of as many seeds, eight at a time.
    static func checkMany(_ count: Int, _ client: Client) async throws {
        try await client.waitUntilReady()
        let start = ContinuousClock.now
        let seeds = Locked(0..<count)
        let seen = try await withThrowingTaskGroup(of: Seen.self) { group in
            for _ in 0..<8 {
                group.addTask {
                    var sum = Seen()
                    while let seed = seeds.withLock({ $0.popFirst() }) {
                        let one = try await check(seed, client)
                        sum = Seen(answers: sum.answers + 1, snapshots: sum.snapshots + one.snapshots, tokens: sum.tokens + one.tokens)
                    }
                    return sum
                }
            }
            return try await group.reduce(into: Seen()) { sum, one in
                sum.answers += one.answers
                sum.snapshots += one.snapshots
                sum.tokens += one.tokens
            }
        }
        #expect(seen.answers == count && seen.snapshots > 2 * count)
        let time = ContinuousClock.now - start
        print("\(count) answers at temperature 1 decode; their \(seen.snapshots) snapshots grow; \(seen.tokens) tokens in \(time)")
    }
}

private let wanted = ProcessInfo.processInfo.environment["MLXINFER_GUIDED_ANSWERS"].flatMap { Int($0) }

/// `MLXINFER_GUIDED_ANSWERS=200` makes and checks as many answers, which may take minutes. Alone, for the measured times:
/// `swift test --filter ManyGuidedAnswers`.
@Suite(.serialized, .enabled(if: LiveServer.command != nil && wanted != nil, "MLXINFER_GUIDED_ANSWERS is not set"))
struct ManyGuidedAnswers {
    @Test func allDecode() async throws {
        try await Ticket.checkMany(try #require(wanted), LiveServer.shared.client)
    }

    /// An answer of 20 KB, a piece of which comes every two milliseconds.
    @Test func aSnapshotComesSoonAfterItsBytes() async throws {
        struct Story: GuidedObject, Decodable, Sendable {
            let chapters: [String]
            static var properties: [Property<Story>] { Property("chapters", \.chapters) }
        }
        let head = Transcript.stream([Transcript.delta(#"{"content":"{\"chapters\":["}"#)], end: false)
        let pieces = (0..<100).map { #"\"\#(String(repeating: "word ", count: 40)) \#($0)\","# }
        let steps = pieces.flatMap { piece -> [FaultServer.Step] in
            [.pause(.milliseconds(2)), .send(Transcript.chunk(Transcript.delta(#"{"content":"\#(piece)"}"#)))]
        }
        let server = try FaultServer([.read, .send(head)] + steps)
        var delays: [Duration] = []
        let client = server.client
        await #expect(throws: MLXInferError.self) {  // the answer breaks off
            for try await snapshot in client.stream(Story.self, "Hi") {
                let (now, count) = (ContinuousClock.now, snapshot.content.chapters?.count ?? 0)
                if count > 0 { delays.append(now - server.sendings[count]) }
            }
        }
        delays.sort()
        #expect(delays.count > 10 && delays[delays.count / 2] < .milliseconds(50))
        print("from a snapshot's bytes to its value: median \(delays[delays.count / 2]), longest \(delays[delays.count - 1])")
    }
}
