import Foundation
import Testing

@testable import MLXInferClient

/// Answers of a type, and tools that run here.
extension LiveTests.Guided {
    private var client: Client { LiveServer.shared.client }

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

    /// `MLXINFER_GUIDED_ANSWERS=200` makes as many.
    private static let count = ProcessInfo.processInfo.environment["MLXINFER_GUIDED_ANSWERS"].flatMap { Int($0) } ?? 12

    private static func request(_ seed: Int) -> ChatRequest {
        let prompt = "Invent a ticket number \(seed). Answer as JSON with to, kind, price, seats and note."
        return ChatRequest([.user(prompt)], options: SamplingOptions(maxTokens: 200, temperature: 1, seed: seed))
    }

    /// The number of an answer's snapshots, after checks of each.
    private static func check(_ client: Client, _ seed: Int) async throws -> Int {
        var (snapshots, last) = (0, Snapshot<Ticket>?.none)
        for try await snapshot in client.stream(Ticket.self, request(seed)) {
            if let last { #expect(snapshot.content.json.continues(last.content.json), "seed \(seed): \(snapshot.response.text)") }
            (snapshots, last) = (snapshots + 1, snapshot)
        }
        let ticket = try #require(last?.value, "seed \(seed)")
        let content = try #require(last?.content)
        #expect(content.to == ticket.to && content.kind == ticket.kind && content.price == ticket.price && content.note == ticket.note)
        #expect((content.seats ?? []).map(\.row) == ticket.seats.map(\.row) && (last?.response.usage?.completionTokens ?? 0) > 0)
        return snapshots
    }

    @Test func answersDecodeAndSnapshotsGrow() async throws {
        let (client, start) = (client, ContinuousClock.now)
        let snapshots = try await withThrowingTaskGroup(of: Int.self) { group in
            for seed in 0..<min(8, Self.count) { group.addTask { try await Self.check(client, seed) } }
            var (next, snapshots) = (8, 0)
            while let count = try await group.next() {
                snapshots += count
                if next < Self.count {
                    group.addTask { [next] in try await Self.check(client, next) }
                    next += 1
                }
            }
            return snapshots
        }
        #expect(snapshots > 2 * Self.count)
        print("\(Self.count) answers at temperature 1 decode; \(snapshots) snapshots grow; \(ContinuousClock.now - start)")
    }

    @Test func theWholeAnswerIsTheSame() async throws {
        var last: Snapshot<Ticket>?
        for try await snapshot in client.stream(Ticket.self, Self.request(3)) { last = snapshot }
        let whole = try await client.generate(Ticket.self, Self.request(3))
        #expect(last?.value?.to == whole.to && last?.value?.price == whole.price)
    }

    @Test func typesWithoutProperties() async throws {
        let options = SamplingOptions(maxTokens: 40, temperature: 1, seed: 1)
        #expect(try await client.generate(Ticket.Kind.self, "A bus or a train?", options: options).rawValue.isEmpty == false)
        #expect([true, false].contains(try await client.generate(Bool.self, "Is the sky blue?", options: options)))
        var numbers: [[Int]] = []
        struct Three: JSONSchemaProviding, Decodable, Sendable {
            typealias PartiallyGenerated = [Int]
            static let jsonSchema = JSONSchema.array(of: .integer(in: 0...99), count: 3...3)
            let numbers: [Int]
            init(from decoder: any Decoder) throws { numbers = try [Int](from: decoder) }
        }
        for try await snapshot in client.stream(Three.self, "Three numbers", options: options) { numbers.append(snapshot.content) }
        #expect(numbers.last?.count == 3 && zip(numbers, numbers.dropFirst()).allSatisfy { $1.starts(with: $0) })
    }

    @Test func toolsAreRunUntilTheAnswerHasNoCalls() async throws {
        struct Place: GuidedObject, Decodable, Sendable {
            let city: String
            static var properties: [Property<Place>] { Property("city", \.city, .string(maxLength: 12)) }
        }
        let places = Locked([String]())
        let weather = CallableTool("weather", "The weather in a city") { (place: Place) in
            places.withLock { $0.append(place.city) }
            return "21 degrees"
        }
        var request = ChatRequest([.user("How is the weather in Rome?")], options: SamplingOptions(maxTokens: 80, temperature: 0))
        (request.toolChoice, request.parallelToolCalls) = (.tool("weather"), false)
        let policy = ToolPolicy(maxRounds: 2, onLimit: .answer)
        let run = try await client.respond(to: request, calling: [weather], policy: policy)
        #expect(run.results.count == places.withLock { $0.count } && !run.results.isEmpty)
        #expect(
            run.results.allSatisfy { !$0.isFailure } && run.messages.last?.role == .assistant && run.response.finishReason != .toolCalls)
        let typed = try await client.generate(Place.self, request, calling: [weather], policy: policy)
        #expect(!typed.city.isEmpty && places.withLock { $0.count } > run.results.count)
    }
}
