/// JSON text that is still being written, closed where it stands.
struct PartialJSON {
    /// The text up to its last whole value, or into its last string, with what closes it; nil before anything is whole.
    var closed: String? {
        guard let whole else { return nil }
        let more = whole.inText ? [UInt8(ascii: "\"")] : []
        return String(decoding: bytes[..<whole.end] + more + open.reversed().map(\.closer), as: UTF8.self)
    }

    /// Where the last whole value ends, or how far the last string goes. What is open there is still open at the end.
    private var whole: (end: Int, inText: Bool)?
    private let bytes: [UInt8]
    private var at = 0
    /// What closes the arrays and objects that are open, the innermost one last, and whether a name comes next in it.
    private var open: [(closer: UInt8, name: Bool)] = []

    init(_ text: String) {
        bytes = Array(text.utf8)
        while at < bytes.count, step() {}
    }

    /// Reads a mark or a value. False where the text ends within one.
    private mutating func step() -> Bool {
        let byte = bytes[at]
        switch byte {
        case UInt8(ascii: " "), 0x0A, 0x0D, 0x09: at += 1
        case UInt8(ascii: "{"), UInt8(ascii: "["):
            open.append((byte + 2, byte == UInt8(ascii: "{")))  // the closing one is two further on in ASCII
            at += 1
            whole = (at, false)
        case UInt8(ascii: "}"), UInt8(ascii: "]"):
            guard open.popLast()?.closer == byte else {
                whole = nil
                return false
            }
            at += 1
            whole = (at, false)
        case UInt8(ascii: ","), UInt8(ascii: ":"):
            guard let last = open.indices.last else { return false }
            open[last].name = byte == UInt8(ascii: ",") && open[last].closer == UInt8(ascii: "}")
            at += 1
        case UInt8(ascii: "\""): return string()
        default: return scalar()
        }
        return true
    }

    private mutating func scalar() -> Bool {
        let marks = Array(",]} \n\r\t".utf8)
        guard let end = bytes[at...].firstIndex(where: marks.contains) else { return false }  // a number may go on
        at = end
        whole = (at, false)
        return true
    }

    private mutating func string() -> Bool {
        let isName = open.last?.name == true
        var (end, last, needsLow) = (at + 1, at + 1, false)
        while end < bytes.count, bytes[end] != UInt8(ascii: "\"") {
            let size = width(at: end)
            guard end + size <= bytes.count else { break }
            needsLow = !needsLow && size == 6 && isHighSurrogate(at: end)
            end += size
            if !needsLow { last = end }
        }
        if end < bytes.count, bytes[end] == UInt8(ascii: "\"") {
            at = end + 1
            if !isName { whole = (at, false) }
            return true
        }
        if !isName { whole = (last, true) }
        return false
    }

    /// Bytes of the character or escape that begins here.
    private func width(at place: Int) -> Int {
        guard bytes[place] == UInt8(ascii: "\\") else { return 1 }
        return place + 1 < bytes.count && bytes[place + 1] == UInt8(ascii: "u") ? 6 : 2
    }

    /// Whether this escape is the first half of a character.
    private func isHighSurrogate(at place: Int) -> Bool {
        let digits = String(decoding: bytes[(place + 2)..<(place + 6)], as: UTF8.self)
        return UInt16(digits, radix: 16).map { (0xD800..<0xDC00).contains($0) } ?? false
    }
}

extension JSONValue {
    /// What JSON text says so far, while it is written: what is open is closed, and what is not whole is left out, but for texts.
    ///
    /// Nil where nothing has been said yet, or the text is no JSON.
    public init?(partial text: String) {
        guard let closed = PartialJSON(text).closed, let value = try? JSONValue(parsing: closed) else { return nil }
        self = value
    }
}

extension ChatResponse {
    /// The text so far as a type of yours, for apps that show an answer while it comes.
    ///
    /// Make what comes late optional: nil is returned as long as something is missing that the type needs.
    public func partial<Value: Decodable>(as type: Value.Type = Value.self) -> Value? {
        JSONValue(partial: text).flatMap { try? $0.decoded(as: type) }
    }
}

extension ToolCall {
    /// The arguments so far as a type of yours, as ``ChatResponse/partial(as:)``.
    public func partialArguments<Arguments: Decodable>(as type: Arguments.Type = Arguments.self) -> Arguments? {
        JSONValue(partial: arguments).flatMap { try? $0.decoded(as: type) }
    }
}
