import Testing

@testable import MLXInferClient

struct TypedToolTests {
    struct Place: Decodable, Equatable {
        var city: String?
        var days: Int?
        var notes: [String]?
    }

    let weather = TypedTool<Place>(name: "weather", description: "The weather", parameters: ["type": "object"], strict: true)

    @Test func aTypedTool() throws {
        #expect(weather.tool.json["function"]?["strict"] == true)
        #expect(Tool(name: "a", description: "b", parameters: [:]).json["function"]?["strict"] == nil)
        let call = ToolCall(id: "1", name: "weather", arguments: #"{"city": "Rome", "days": 2}"#)
        #expect(try weather.arguments(of: call) == Place(city: "Rome", days: 2))
        #expect(try weather.arguments(of: ToolCall(id: "2", name: "clock", arguments: "{}")) == nil)
        #expect(throws: MLXInferError.self) { try weather.arguments(of: ToolCall(id: "3", name: "weather", arguments: "{")) }
    }

    @Test func whatIsThereSoFar() {
        let steps: [(String, Place?)] = [
            ("", nil), ("{", Place()), (#"{"ci"#, Place()), (#"{"city": "#, Place()), (#"{"city": "Ro"#, Place(city: "Ro")),
            (#"{"city": "Rome", "days": 1"#, Place(city: "Rome")), (#"{"city": "Rome", "days": 12,"#, Place(city: "Rome", days: 12)),
            (#"{"notes": ["a", "b"#, Place(notes: ["a", "b"])), (#"{"notes": ["a"], "da"#, Place(notes: ["a"])),
        ]
        for (text, place) in steps {
            #expect(weather.partialArguments(of: ToolCall(id: "1", name: "weather", arguments: text)) == place, "\(text)")
        }
        #expect(weather.partialArguments(of: ToolCall(id: "1", name: "clock", arguments: "{}")) == nil)
    }

    @Test func everyBeginningIsJSONThatGrows() throws {
        let text = #"{"a": "x\"y\\z \u00e9 \ud83d\ude00 \n", "b": [1, -2.5e3, true, null, {"c": []}], "d": {}}"#
        let whole = try JSONValue(parsing: text)
        #expect(JSONValue(partial: text) == whole)
        var last = 0
        for length in 1...text.count {
            let value = try #require(JSONValue(partial: String(text.prefix(length))), "\(text.prefix(length))")
            let size = value.description.count
            #expect(size >= last - 4, "\(text.prefix(length))")
            last = size
        }
        for wrong in ["}", "]", "{]", "nonsense"] { #expect(JSONValue(partial: wrong) == nil, "\(wrong)") }
    }

    /// Closed after each of its values, it would be copied 200,000 times.
    @Test(.timeLimit(.minutes(1))) func aLongTextIsCopiedOnce() throws {
        let text = "[" + String(repeating: "1,", count: 200_000) + "[\"a"
        guard case .array(let values)? = JSONValue(partial: text) else {
            Issue.record("no array")
            return
        }
        #expect(values.count == 200_001)
        #expect(values.last == .array([.string("a")]))
    }
}
