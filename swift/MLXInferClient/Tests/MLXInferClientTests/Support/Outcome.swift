@testable import MLXInferClient

/// What a reader makes of bytes: what it hands out, and how it ends.
struct Outcome<Output: Equatable>: Equatable {
    var output: [Output] = []
    var failure: String?
    var isComplete = false
    var partial = ""

    /// - Parameter closed: whether the connection ends behind the bytes.
    init<Reader: AnswerReader>(_ reader: Reader, _ bytes: [UInt8], cut cuts: [Int] = [], closed: Bool = true)
    where Reader.Output == Output {
        var reader = reader
        do {
            for piece in pieces(of: bytes, cut: cuts) where !reader.isComplete { try reader.feed(piece, into: &output) }
            if closed, !reader.isComplete { try reader.end(into: &output) }
        } catch {
            failure = "\(error)"
        }
        isComplete = reader.isComplete
        partial = reader.partial
    }
}

/// A response as one value, body put together.
struct Parsed: Equatable {
    var head: ResponseHead?
    var body: [UInt8] = []
    var ended = false
    var failure: HTTPFailure?

    init(_ bytes: [UInt8], cut cuts: [Int] = [], closed: Bool = true) {
        var parser = ResponseParser()
        var parts: [ResponseParser.Part] = []
        do {
            for piece in pieces(of: bytes, cut: cuts) { try parser.feed(piece, into: &parts) }
            if closed { try parser.end(into: &parts) }
        } catch {
            failure = error as? HTTPFailure
        }
        for part in parts {
            switch part {
            case .head(let head): self.head = head
            case .body(let bytes): body += bytes
            case .end: ended = true
            }
        }
    }

    var text: String { String(decoding: body, as: UTF8.self) }

    var isMalformed: Bool { if case .malformed = failure { true } else { false } }
    var isTruncated: Bool { if case .truncated = failure { true } else { false } }
}
