/// Reads JSON text while it is written, piece by piece. The time of a piece does not grow with the text before it.
struct PartialJSON {
    /// An array or object that is still open.
    private struct Frame {
        let isObject: Bool
        var elements: [JSONValue] = []
        var members = JSONObject()
        /// The name of the member that comes next.
        var name: String?
    }

    private enum Expected { case value, valueOrEnd, name, nameOrEnd, colon, commaOrEnd, nothing }

    private enum Token {
        case none
        case text(PartialText)
        case scalar([UInt8])
    }

    /// The deepest nesting that is read, as in Foundation.
    private static let depthLimit = 512

    private var open: [Frame] = []
    private var expected = Expected.value
    private var token = Token.none
    private var root: JSONValue?
    /// True once the text cannot become JSON any more.
    private(set) var isMalformed = false

    init(_ text: String = "") { feed(text) }

    mutating func feed(_ text: String) {
        for byte in text.utf8 where !isMalformed { isMalformed = !take(byte) }
    }

    /// The value so far, with everything open closed; nil before it has begun, and if the text is malformed.
    var value: PartialJSONValue? {
        guard !isMalformed else { return nil }
        if let root { return PartialJSONValue(value: root, endsInText: false) }
        var inner: JSONValue?
        if case .text(let text) = token, expected == .value || expected == .valueOrEnd { inner = .string(text.string) }
        let endsInText = inner != nil
        for frame in open.reversed() { inner = Self.closed(frame, with: inner) }
        return inner.map { PartialJSONValue(value: $0, endsInText: endsInText) }
    }

    private static func closed(_ frame: Frame, with last: JSONValue?) -> JSONValue {
        guard frame.isObject else { return .array(last.map { frame.elements + [$0] } ?? frame.elements) }
        var members = frame.members
        if let name = frame.name, let last, members[name] == nil { members[name] = last }
        return .object(members)
    }
}

extension PartialJSON {
    /// False if the byte cannot stand here.
    private mutating func take(_ byte: UInt8) -> Bool {
        switch token {
        case .text(var text):
            token = .none  // so that the text has one owner while it grows
            switch text.take(byte) {
            case .open: token = .text(text)
            case .closed: return end(text.string)
            case .malformed: return false
            }
            return true
        case .scalar(var bytes):
            if !Self.endsScalar(byte) {
                token = .none
                bytes.append(byte)
                token = .scalar(bytes)
                return bytes.count <= 1024
            }
            token = .none
            guard let value = Self.scalar(bytes), add(value) else { return false }
        case .none: break
        }
        return mark(byte)
    }

    private mutating func mark(_ byte: UInt8) -> Bool {
        switch byte {
        case UInt8(ascii: " "), 0x0A, 0x0D, 0x09: return true
        case UInt8(ascii: "{"), UInt8(ascii: "["): return begin(isObject: byte == UInt8(ascii: "{"))
        case UInt8(ascii: "}"), UInt8(ascii: "]"): return end(isObject: byte == UInt8(ascii: "}"))
        case UInt8(ascii: ","):
            guard expected == .commaOrEnd, let frame = open.last else { return false }
            expected = frame.isObject ? .name : .value
        case UInt8(ascii: ":"):
            guard expected == .colon else { return false }
            expected = .value
        case UInt8(ascii: "\""):
            guard expected != .colon, expected != .commaOrEnd, expected != .nothing else { return false }
            token = .text(PartialText())
        default:
            guard expected == .value || expected == .valueOrEnd else { return false }
            token = .scalar([byte])
        }
        return true
    }

    private mutating func begin(isObject: Bool) -> Bool {
        guard expected == .value || expected == .valueOrEnd, open.count < Self.depthLimit else { return false }
        open.append(Frame(isObject: isObject))
        expected = isObject ? .nameOrEnd : .valueOrEnd
        return true
    }

    private mutating func end(isObject: Bool) -> Bool {
        let mayEnd = expected == .commaOrEnd || expected == (isObject ? .nameOrEnd : .valueOrEnd)
        guard mayEnd, let frame = open.last, frame.isObject == isObject else { return false }
        open.removeLast()
        return add(Self.closed(frame, with: nil))
    }

    /// Takes a text that is whole, as a name or as a value.
    private mutating func end(_ text: String) -> Bool {
        guard expected == .name || expected == .nameOrEnd else { return add(.string(text)) }
        open[open.count - 1].name = text
        expected = .colon
        return true
    }

    /// Takes a value that is whole.
    private mutating func add(_ value: JSONValue) -> Bool {
        guard let last = open.indices.last else {
            (root, expected) = (value, .nothing)
            return true
        }
        if open[last].isObject {
            guard let name = open[last].name else { return false }
            if open[last].members[name] == nil { open[last].members[name] = value }  // the first one of a name stays
            open[last].name = nil
        } else {
            open[last].elements.append(value)
        }
        expected = .commaOrEnd
        return true
    }

    private static func endsScalar(_ byte: UInt8) -> Bool {
        switch byte {
        case UInt8(ascii: ","), UInt8(ascii: "]"), UInt8(ascii: "}"), UInt8(ascii: " "), 0x0A, 0x0D, 0x09: true
        default: false
        }
    }

    private static func scalar(_ bytes: [UInt8]) -> JSONValue? {
        let text = String(decoding: bytes, as: UTF8.self)
        switch text {
        case "null": return .null
        case "true": return true
        case "false": return false
        default:
            guard let first = bytes.first, first == UInt8(ascii: "-") || (0x30...0x39).contains(first) else { return nil }
            if let whole = Int(text) { return .integer(whole) }
            guard let number = Double(text), number.isFinite else { return nil }
            return Int(exactly: number).map { .integer($0) } ?? .number(number)
        }
    }
}
