import Foundation
import Testing

@testable import MLXInferClient

/// Answers of a type, and tools that run here.
extension LiveTests.Guided {
    private var client: Client { LiveServer.shared.client }

    @Test func answersDecodeAndSnapshotsGrow() async throws { try await Ticket.checkMany(12, client) }

    @Test func theWholeAnswerIsTheSame() async throws {
        var last: Snapshot<Ticket>?
        for try await snapshot in client.stream(Ticket.self, Ticket.request(3)) { last = snapshot }
        let whole = try await client.generate(Ticket.self, Ticket.request(3))
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

    @Test func aTypeThatContainsItself() async throws {
        struct Node: GuidedObject, Decodable, Sendable {
            let name: String
            let children: [Node]
            static var properties: [Property<Node>] {
                Property("name", \.name, .string(maxLength: 6))
                Property("children", \.children, .array(of: Node.jsonSchema, count: 0...1))
            }
        }
        let options = SamplingOptions(maxTokens: 400, temperature: 0)
        do {
            let node = try await client.generate(Node.self, "A tree of two nodes as JSON, with name and children", options: options)
            #expect(node.children.count < 2 && node.name.count <= 6)
        } catch MLXInferError.undecodableAnswer(_, let reason) {
            #expect(reason == "the limit of tokens cut it off")  // a small model may go on
        }
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
