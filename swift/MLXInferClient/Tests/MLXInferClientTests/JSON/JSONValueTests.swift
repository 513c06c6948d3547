import Foundation
import Testing

@testable import MLXInferClient

struct JSONValueTests {
    @Test func membersKeepTheirOrder() throws {
        let value: JSONValue = ["z": 1, "a": [true, nil, 2.5, "x"], "m": ["q": "r", "b": -3]]
        #expect(value.description == #"{"z":1,"a":[true,null,2.5,"x"],"m":{"q":"r","b":-3}}"#)
        #expect(value == ["m": ["b": -3, "q": "r"], "a": [true, nil, 2.5, "x"], "z": 1])
    }

    @Test func textsAreEscaped() throws {
        let text = "\u{0}\u{1F}\u{7F}\"\\/\n\r\t\u{2028}Grüße 🙂"
        let written = JSONValue.string(text).description
        #expect(written == "\"\\u0000\\u001f\u{7F}\\\"\\\\/\\n\\r\\t\u{2028}Grüße 🙂\"")
        #expect(try JSONValue(parsing: written) == .string(text))
    }

    @Test(arguments: ["null", "true", "-7", "0.25", "1e+300", "[]", "{}", #"[[],{"a":{}}]"#, "9007199254740993", "5e-324"])
    func parsedAndWrittenAgain(_ text: String) throws {
        #expect(try JSONValue(parsing: text).description == text)
    }

    @Test(arguments: [Double.infinity, -.infinity, .nan])
    func numbersThatJSONHasNot(_ number: Double) {
        #expect(throws: MLXInferError.self) { try JSONValue.array([.number(number)]).encoded() }
    }

    @Test func parts() throws {
        let value = try JSONValue(parsing: #"{"list": [1, 2.0, "three"], "yes": true, "none": null}"#)
        #expect(value["list"]?[0]?.integer == 1)
        #expect(value["list"]?[1]?.integer == 2)
        #expect(value["list"]?[0]?.double == 1)
        #expect(value["list"]?[2]?.string == "three")
        #expect(value["list"]?[3] == nil && value["none"] == .null && value["missing"] == nil && value["list"]?["x"] == nil)
        #expect(value["yes"]?.bool == true && value["yes"]?.integer == nil && value["list"]?.array?.count == 3)
    }

    @Test func membersCanBeSetAndRemoved() {
        var object: JSONObject = ["a": 1, "b": 2, "a": 3]
        #expect(object.keys == ["a", "b"] && object["a"] == 3)
        object["a"] = nil
        object["c"] = .null
        object["b"] = 4
        #expect(object.keys == ["b", "c"] && object.members.map(\.value) == [4, .null])
    }

    @Test func typesOfOthers() throws {
        struct Point: Codable, Equatable {
            var x: Int
            var y: Double
            var name: String?
        }
        let point = Point(x: 1, y: 2.5, name: nil)
        #expect(try JSONValue(encoding: point) == ["x": 1, "y": 2.5])
        #expect(try JSONValue(encoding: point).decoded() == point)
        #expect(try JSONDecoder().decode(JSONValue.self, from: JSONEncoder().encode(JSONValue.array([1, ["a": nil]]))) == [1, ["a": nil]])
    }
}
