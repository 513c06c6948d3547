import Testing

@testable import MLXInferClient

struct EventStreamTests {
    private struct Result: Equatable {
        var events: [String] = []
        var failed = false
    }

    private func read(_ bytes: [UInt8], cut cuts: [Int] = [], limit: Int = 1000) -> Result {
        var stream = EventStream(limit: limit)
        var events: [ServerSentEvent] = []
        var result = Result()
        do {
            for piece in pieces(of: bytes, cut: cuts) { try stream.feed(piece, into: &events) }
            try stream.end(into: &events)
        } catch {
            result.failed = true
        }
        result.events = events.map { ($0.name.isEmpty ? "" : "\($0.name): ") + String(decoding: $0.data, as: UTF8.self) }
        return result
    }

    @Test(arguments: [
        ("data: a\n\ndata: b\n\n", ["a", "b"]),
        ("data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        ("data: a\r\rdata: b\r\r", ["a", "b"]),
        ("data: a\r\ndata: b\n\rdata: c\r\n\n", ["a\nb", "c"]),
        ("data:a\ndata: b\ndata:  c\n\n", ["a\nb\n c"]),
        ("data\ndata\n\n", ["\n"]),
        ("data:\n\n", [""]),
        (": a comment\n\n:\n\n: another\ndata: a\n: a third\n\n", ["a"]),
        ("event: ping\ndata: a\n\ndata: b\n\n", ["ping: a", "b"]),
        ("event: lonely\n\ndata: b\n\n", ["b"]),
        ("id: 1\nretry: 5\nunknown: x\nwithout colon\ndata: a\n\n", ["a"]),
        ("\u{FEFF}data: a\n\n", ["a"]),
        ("\n\n\n\ndata: a\n\n\n\n", ["a"]),
        ("data: a\n\n\u{FEFF}data: b\n\n", ["a"]),
        ("data: a\n\ndata: no final newline", ["a", "no final newline"]),
        ("data: a\n\ndata: one newline\n", ["a", "one newline"]),
        ("data: {\"text\": \"Grüße 🙂\"}\n\n", ["{\"text\": \"Grüße 🙂\"}"]),
        (" data: a\n\nDATA: b\n\n", []),
        ("", []),
    ])
    func events(_ text: String, _ expected: [String]) {
        for cuts in splits(of: text.bytes.count) { #expect(read(text.bytes, cut: cuts) == Result(events: expected), "cut at \(cuts)") }
    }

    @Test func bytesThatAreNotUTF8ArriveAsTheyAre() throws {
        var stream = EventStream()
        var events: [ServerSentEvent] = []
        try stream.feed("data: ".bytes + [0xFF, 0xC3, 0x00] + "\n\n".bytes, into: &events)
        #expect(events == [ServerSentEvent(data: [0xFF, 0xC3, 0x00])])
    }

    @Test func limits() {
        let line = "data: a\n\ndata: " + String(repeating: "x", count: 50)
        let lines = "data: a\n\n" + String(repeating: "data: 0123456789\n", count: 5) + "\n"
        let comment = ": " + String(repeating: "x", count: 50)
        for text in [line, lines] { #expect(read(text.bytes, limit: 40) == Result(events: ["a"], failed: true)) }
        #expect(read(comment.bytes, limit: 40) == Result(failed: true))
        #expect(read((String(repeating: ": comment\n", count: 100) + "data: a\n\n").bytes, limit: 40) == Result(events: ["a"]))
    }
}
