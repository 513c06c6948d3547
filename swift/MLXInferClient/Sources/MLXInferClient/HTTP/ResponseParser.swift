/// Parses one HTTP/1.1 response (RFC 9112), fed with bytes split anywhere. Knows nothing of sockets.
///
/// What was completed before an error is handed out all the same, so that the result never depends on how the bytes were split.
/// Interim responses (100 to 199) are skipped. What follows the end of the response is ignored, for a connection carries one request.
struct ResponseParser: Sendable {
    enum Part: Sendable, Equatable {
        case head(ResponseHead)
        case body([UInt8])
        case end
    }

    private enum State {
        case statusLine, fields
        case length(left: Int)
        case chunked(ChunkedBody)
        case untilClosed, done
    }

    private static let lineLimit = 16 << 10
    private static let fieldLimit = 128
    private static let interimLimit = 16

    private var state = State.statusLine
    private var lines = CRLFLines(limit: lineLimit)
    private var head = ResponseHead(status: 0, reason: "")
    private var interim = 0

    /// Adds the parts that these bytes complete.
    mutating func feed(_ bytes: some Collection<UInt8>, into parts: inout [Part]) throws {
        var input = ArraySlice(bytes)
        while !input.isEmpty {
            switch state {
            case .statusLine:
                if let line = try lines.next(from: &input) { try readStatus(line) }
            case .fields:
                if let line = try lines.next(from: &input) { try readField(line, &parts) }
            case .length(let left):
                let part = input.prefix(left)
                input.removeFirst(part.count)
                parts.append(.body(Array(part)))
                state = .length(left: left - part.count)
                if part.count == left { finish(&parts) }
            case .chunked(var body):
                var data: [UInt8] = []
                let result = Result { try body.decode(&input, into: &data) }
                if !data.isEmpty { parts.append(.body(data)) }
                try result.get()
                state = .chunked(body)
                if body.isDone { finish(&parts) }
            case .untilClosed:
                parts.append(.body(Array(input)))
                input = []
            case .done: input = []
            }
        }
    }

    /// Adds the parts that the end of the connection completes; throws where the response is not complete.
    mutating func end(into parts: inout [Part]) throws {
        switch state {
        case .done: break
        case .untilClosed: finish(&parts)
        case .statusLine, .fields: throw HTTPFailure.truncated("the connection was closed before the answer began")
        case .length, .chunked: throw HTTPFailure.truncated("the connection was closed in the middle of the answer")
        }
    }

    private mutating func finish(_ parts: inout [Part]) {
        state = .done
        parts.append(.end)
    }

    private mutating func readStatus(_ line: String) throws {
        let words = line.split(separator: " ", maxSplits: 2, omittingEmptySubsequences: false)
        guard words.count >= 2, words[0] == "HTTP/1.1" || words[0] == "HTTP/1.0", words[1].utf8.count == 3,
            words[1].utf8.allSatisfy({ (0x30...0x39).contains($0) }), let status = Int(words[1]), (100..<600).contains(status)
        else { throw HTTPFailure.malformed("not the first line of an HTTP answer: \(line.prefix(80))") }
        head = ResponseHead(status: status, reason: words.count > 2 ? String(words[2]) : "")
        state = .fields
    }

    private mutating func readField(_ line: String, _ parts: inout [Part]) throws {
        guard line.isEmpty else {
            guard head.fields.fields.count < Self.fieldLimit else {
                throw HTTPFailure.malformed("more than \(Self.fieldLimit) header fields")
            }
            return head.fields.fields.append(try Self.field(line))
        }
        if head.status < 200 {
            interim += 1
            guard head.status != 101, interim <= Self.interimLimit else { throw HTTPFailure.malformed("status \(head.status), unasked") }
            state = .statusLine
            return
        }
        parts.append(.head(head))
        try chooseFraming(&parts)
    }

    private mutating func chooseFraming(_ parts: inout [Part]) throws {
        let codings = head.fields.values("transfer-encoding")
        let lengths = Set(head.fields.values("content-length"))
        if head.status == 204 || head.status == 304 {
            finish(&parts)
        } else if !codings.isEmpty {
            guard codings.map({ $0.lowercased() }) == ["chunked"], lengths.isEmpty else {
                throw HTTPFailure.malformed("transfer coding \(codings.joined(separator: ", ")), lengths \(lengths.count)")
            }
            state = .chunked(ChunkedBody())
        } else if let text = lengths.first {
            guard lengths.count == 1, (1...15).contains(text.utf8.count), text.utf8.allSatisfy({ (0x30...0x39).contains($0) }),
                let length = Int(text)
            else { throw HTTPFailure.malformed("not a length: \(lengths.sorted().joined(separator: ", ").prefix(80))") }
            state = .length(left: length)
            if length == 0 { finish(&parts) }
        } else {
            state = .untilClosed
        }
    }

    private static func field(_ line: String) throws -> Headers.Field {
        let marks = Set("!#$%&'*+-.^_`|~".utf8)
        guard let colon = line.firstIndex(of: ":"), colon != line.startIndex,
            line[..<colon].utf8.allSatisfy({
                marks.contains($0) || Character(UnicodeScalar($0)).isLetter || Character(UnicodeScalar($0)).isNumber
            }),
            line[..<colon].utf8.allSatisfy({ $0 < 0x80 })
        else { throw HTTPFailure.malformed("not a header field: \(line.prefix(80))") }
        var value = line[line.index(after: colon)...].drop { $0 == " " || $0 == "\t" }
        while value.last == " " || value.last == "\t" { value.removeLast() }
        return Headers.Field(name: line[..<colon].lowercased(), value: String(value))
    }
}
