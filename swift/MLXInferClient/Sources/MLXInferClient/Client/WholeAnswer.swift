/// Collects the body of an answer that is not streamed; an answer with a status of failure is thrown as the server's error.
struct WholeAnswer: AnswerReader {
    private let limit: Int
    private var parser = ResponseParser()
    private var head: ResponseHead?
    private var body: [UInt8] = []
    private(set) var isComplete = false
    var partial: String { "" }

    init(limit: Int = 16 << 20) { self.limit = limit }

    mutating func feed(_ bytes: ArraySlice<UInt8>, into output: inout [[UInt8]]) throws {
        var parts: [ResponseParser.Part] = []
        try parser.feed(bytes, into: &parts)
        try take(parts, into: &output)
    }

    mutating func end(into output: inout [[UInt8]]) throws {
        var parts: [ResponseParser.Part] = []
        try parser.end(into: &parts)
        try take(parts, into: &output)
    }

    mutating func take(_ parts: [ResponseParser.Part], into output: inout [[UInt8]]) throws {
        for part in parts {
            switch part {
            case .head(let head): self.head = head
            case .body(let bytes):
                guard body.count + bytes.count <= limit else { throw HTTPFailure.malformed("an answer of more than \(limit) bytes") }
                body += bytes
            case .end:
                isComplete = true
                if let head, !head.succeeded { throw MLXInferError.api(APIError(head: head, body: body)) }
                output.append(body)
            }
        }
    }
}
