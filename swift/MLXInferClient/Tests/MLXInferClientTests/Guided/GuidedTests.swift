import Foundation
import Testing

@testable import MLXInferClient

struct GuidedTests {
    private static let text = #"""
        {"city": "Rome \"R\"", "season": "sunday", "price": 12.5, "is_far": true,
         "stops": [{"name": "A", "nights": 2}, {"name": "Bé", "nights": 11}], "note": null, "tags": {"x": "sun"}}
        """#

    @Test func schemas() {
        let schema = Journey.jsonSchema.json
        #expect(schema["properties"]?.object?.keys == ["city", "season", "price", "is_far", "stops", "note", "tags"])
        #expect(schema["required"] == ["city", "season", "price", "is_far", "stops"] && schema["additionalProperties"] == false)
        #expect(schema["properties"]?["city"] == ["type": "string", "maxLength": 12, "description": "Where to"])
        #expect(schema["properties"]?["season"] == ["type": "string", "enum": ["sun", "sunday", "winter"]])
        #expect(schema["properties"]?["price"] == ["type": "number", "minimum": 1.0, "maximum": 999.0])
        #expect(
            schema["properties"]?["stops"]?["items"] == Journey.Stop.jsonSchema.json && schema["properties"]?["stops"]?["maxItems"] == 2)
        #expect(schema["properties"]?["tags"] == ["type": "object", "additionalProperties": Journey.Season.jsonSchema.json])
        #expect([Int].jsonSchema.json == ["type": "array", "items": ["type": "integer"]])
        #expect(JSONSchema.anyOf([.boolean, .string(pattern: "a+", format: "date")]).json["anyOf"]?[1]?["pattern"] == "a+")
        let request = ChatRequest([.user("Hi")]).guided(by: Journey.self)
        #expect(request.responseFormat == .jsonSchema(name: "Journey", schema: schema))
    }

    @Test func typesThatContainThemselves() throws {
        struct Node: GuidedObject, Decodable, Sendable {
            let name: String
            let children: [Node]
            static var properties: [Property<Node>] {
                Property("name", \.name)
                Property("children", \.children)
            }
        }
        struct Forest: GuidedObject, Decodable, Sendable {
            let trees: [Node]
            let best: Node?
            static var properties: [Property<Forest>] {
                Property("trees", \.trees)
                Property("best", \.best)
            }
        }
        let format = try #require(ChatRequest([]).guided(by: Forest.self).responseFormat)
        guard case .jsonSchema(_, let schema, _) = format else { return }
        #expect(schema["properties"]?["trees"]?["items"] == ["$ref": "#/$defs/Node"])
        #expect(schema["properties"]?["best"] == ["$ref": "#/$defs/Node"])
        #expect(schema["$defs"]?["Node"]?["properties"]?["children"]?["items"] == ["$ref": "#/$defs/Node"])
        #expect(schema["$defs"]?.object?.keys == ["Node"] && schema["$defs"]?["Node"]?["$defs"] == nil)
        let text = #"{"trees": [{"name": "a", "children": [{"name": "b", "chil"#
        let forest = try #require(PartialJSON(text).value.flatMap { Forest.partiallyGenerated(from: $0) })
        #expect(forest.trees?[0].name == "a" && forest.trees?[0].children?[0].name == "b" && forest.best == nil)
    }

    @Test func propertiesAppearAsTheyAreWritten() throws {
        let steps: [(String, (PartialObject<Journey>) -> Bool)] = [
            ("{", { $0.city == nil && $0.stops == nil }),
            (#"{"city": "Ro"#, { $0.city == "Ro" && $0.season == nil }),
            (#"{"city": "Rome", "season": "sun"#, { $0.city == "Rome" && $0.season == nil }),
            (#"{"city": "Rome", "season": "sun","#, { $0.season == .sun }),
            (#"{"season": "sunday", "price": 1"#, { $0.season == .sunday && $0.price == nil }),
            (#"{"price": 12, "is_far": tru"#, { $0.price == 12 && $0.isFar == nil }),
            (#"{"is_far": true}"#, { $0.isFar == true }),
            (#"{"stops": [{"#, { $0.stops?.count == 1 && $0.stops?[0].name == nil }),
            (#"{"stops": [{"name": "A", "nights": 2}, {"name": "B"#, { $0.stops?[0].nights == 2 && $0.stops?[1].name == "B" }),
            (#"{"note": null, "tags": {"x": "sun", "y": "wint"#, { $0.note == nil && $0.tags == ["x": .sun] }),
            (#"{"note": "so"#, { $0.note == "so" }),
        ]
        for (text, isRight) in steps {
            let object = try #require(PartialJSON(text).value.flatMap { Journey.partiallyGenerated(from: $0) }, "\(text)")
            #expect(isRight(object), "\(text)")
        }
    }

    @Test func aPartialTypeOfOnesOwn() {
        struct Place: JSONSchemaProviding {
            struct PartiallyGenerated: Decodable, Equatable {
                var city: String?
                var days: Int?
            }
            static let jsonSchema: JSONSchema = [
                "type": "object", "properties": ["city": ["type": "string"], "days": ["type": "integer"]],
            ]
        }
        struct Anything: JSONSchemaProviding { static let jsonSchema: JSONSchema = [:] }
        func partial<Value: JSONSchemaProviding>(_ type: Value.Type, _ text: String) -> Value.PartiallyGenerated? {
            PartialJSON(text).value.flatMap { Value.partiallyGenerated(from: $0) }
        }
        #expect(partial(Place.self, #"{"city": "Ro"#) == Place.PartiallyGenerated())
        #expect(partial(Place.self, #"{"city": "Rome", "da"#) == Place.PartiallyGenerated(city: "Rome"))
        #expect(partial(Place.self, #"{"city": "Rome", "days": 2}"#) == Place.PartiallyGenerated(city: "Rome", days: 2))
        #expect(partial(Anything.self, #"{"city": "Ro"#)?["city"] == "Ro")
        #expect(partial([Int].self, "[1, 2, 3") == [1, 2])
        #expect(partial([String].self, #"["a", "b"#) == ["a", "b"])
    }

    @Test func snapshotsOfEverySplit() throws {
        let journey = try JSONDecoder().decode(Journey.self, from: Data(Self.text.utf8))
        let characters = Self.text.unicodeScalars.map(String.init)
        for cuts in splits(of: characters.count, random: 20).prefix(40) {
            var maker = SnapshotMaker<Journey>()
            var snapshots: [Snapshot<Journey>] = []
            let ends = cuts + [characters.count]
            for (start, end) in zip([0] + ends, ends) where start < end {
                if let next = try maker.add(.text(characters[start..<end].joined())) { snapshots.append(next) }
            }
            if let next = try maker.add(.finished(.stop)) { snapshots.append(next) }
            if let next = try maker.add(.usage(Usage(promptTokens: 1, completionTokens: 2))) { snapshots.append(next) }
            #expect(zip(snapshots, snapshots.dropFirst()).allSatisfy { $1.content.json.continues($0.content.json) })
            #expect(snapshots.dropLast(2).allSatisfy { $0.value == nil })
            #expect(snapshots.last?.value == journey && snapshots.last?.content.stops?[1].nights == 11)
            #expect(snapshots.last?.response.usage?.completionTokens == 2)
        }
    }

    @Test func answersThatAreNoSuchValue() async throws {
        let cut = Transcript.stream([
            Transcript.delta(#"{"content":"{\"city\":\"Ro"}"#), Transcript.delta("{}", finish: #""length""#), Transcript.done,
        ])
        let wrong = Transcript.stream([
            Transcript.delta(#"{"content":"{\"city\":1}"}"#), Transcript.delta("{}", finish: #""stop""#), Transcript.done,
        ])
        let server = try FaultServer([.read, .send(cut)], [.read, .send(cut)], [.read, .send(wrong)])
        var cities: [String?] = []
        let expected = MLXInferError.undecodableAnswer(text: #"{"city":"Ro"#, reason: "the limit of tokens cut it off")
        await #expect(throws: expected) {
            for try await snapshot in server.client.stream(Journey.self, "Hi") { cities.append(snapshot.content.city) }
        }
        #expect(cities.allSatisfy { $0 == "Ro" })
        await #expect(throws: expected) { try await server.client.generate(Journey.self, "Hi") }
        let other = await #expect(throws: MLXInferError.self) { for try await _ in server.client.stream(Journey.self, "Hi") {} }
        #expect(other == .undecodableAnswer(text: #"{"city":1}"#, reason: "city is not of type String"))
    }
}
