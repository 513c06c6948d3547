import Foundation
import Testing

@testable import MLXInferClient

struct PartialJSONTests {
    /// A value with all that JSON can write.
    private static func value(_ dice: inout Dice, depth: Int = 0) -> JSONValue {
        switch Int.random(in: 0..<(depth > 3 ? 5 : 8), using: &dice) {
        case 0: .null
        case 1: .bool(.random(using: &dice))
        case 2: .integer(.random(in: -1000...1000, using: &dice))
        case 3: .number(.random(in: -1e9...1e9, using: &dice))
        case 4: .string(text(&dice))
        case 5, 6:
            .object(
                JSONObject(
                    (0..<Int.random(in: 0...4, using: &dice)).map { (text(&dice) + String($0), value(&dice, depth: depth + 1)) }))
        default: .array((0..<Int.random(in: 0...4, using: &dice)).map { _ in value(&dice, depth: depth + 1) })
        }
    }

    private static func text(_ dice: inout Dice) -> String {
        let letters = Array("ab\"\\/\n\t\u{1}{}[]:, é😀👩‍👩‍👧\u{301}").map(String.init)
        return (0..<Int.random(in: 0...8, using: &dice)).map { _ in letters.randomElement(using: &dice) ?? "" }.joined()
    }

    @Test func everyBeginningGrowsToTheWhole() throws {
        var dice = Dice(seed: 5)
        for _ in 0..<200 {
            let whole = Self.value(&dice)
            let text = whole.description + " "
            var (parser, last) = (PartialJSON(), PartialJSONValue?.none)
            for scalar in text.unicodeScalars {
                parser.feed(String(scalar))
                let now = parser.value
                if let last { #expect(now?.continues(last) == true, "\(text): \(String(describing: now))") }
                last = now
            }
            #expect(last?.value == whole && last?.endsInText == false, "\(text)")
        }
    }

    @Test func foundationReadsTheSame() throws {
        let texts = [
            #"{"a": "x\"y\\z \u00e9 \ud83d\ude00 \n\/\b\f\r\t", "b": [1, -2.5e3, 1.0, 1E2, 0.1], "d": {}}"#, "[[], {}, null, true]",
        ]
        for text in texts { #expect(PartialJSON(text).value?.value == (try JSONValue(parsing: text))) }
    }

    @Test func theOrderOfMembersIsKept() {
        #expect(JSONValue(partial: #"{"b": 1, "a": {"z": 1, "c": 2}"#)?.description == #"{"b":1,"a":{"z":1,"c":2}}"#)
    }

    @Test(arguments: [
        "nonsense ", "{a", "[1 2", "[,", "{\"a\",", "{\"a\":,", "[1,]", "{\"a\":1,}", "\"\u{1}", #""\x"#, #""\uZZZZ"#, "[1]]", "{}{",
        "tru ",
        "[1.2.3,", "--1 ", "[\"a\":", "{1:",
    ])
    func malformed(_ text: String) {
        #expect(PartialJSON(text).value == nil && PartialJSON(text).isMalformed, "\(text)")
    }

    @Test func nestingHasALimit() {
        #expect(PartialJSON(String(repeating: "[", count: 512)).value != nil)
        #expect(PartialJSON(String(repeating: "[", count: 100_000)).isMalformed)
    }

    @Test func halfACharacterIsHeldBack() {
        #expect(JSONValue(partial: #"["a\ud83d"#) == ["a"])
        #expect(JSONValue(partial: #"["a\ud83d\ude"#) == ["a"])
        #expect(JSONValue(partial: #"["a\ud83d\ude00"#) == ["a😀"])
        #expect(JSONValue(partial: #"["a\ud83dx"#) == ["a\u{FFFD}x"])
        #expect(JSONValue(partial: #"["a\ud83d"]"#) == ["a\u{FFFD}"])
    }

    @Test func theFirstOfTwoMembersStays() {
        #expect(JSONValue(partial: #"{"a": 1, "a": 2, "a": "x"#) == ["a": 1])
    }
}
