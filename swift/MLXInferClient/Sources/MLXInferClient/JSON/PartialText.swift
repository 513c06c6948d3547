/// A JSON string while it is written: its escapes are read, and half of a character is held back.
struct PartialText {
    enum Step { case open, closed, malformed }

    private var bytes: [UInt8] = []
    /// The bytes of an escape that is not whole, its backslash first.
    private var escape: [UInt8] = []
    /// The first half of a character that two escapes write.
    private var high: UInt16?

    /// The text so far.
    var string: String { String(decoding: bytes, as: UTF8.self) }

    mutating func take(_ byte: UInt8) -> Step {
        if !escape.isEmpty { return takeEscape(byte) }
        switch byte {
        case UInt8(ascii: "\""):
            endHalf()
            return .closed
        case UInt8(ascii: "\\"): escape = [byte]
        case 0..<0x20: return .malformed
        default:
            endHalf()
            bytes.append(byte)
        }
        return .open
    }

    private mutating func takeEscape(_ byte: UInt8) -> Step {
        escape.append(byte)
        if escape[1] == UInt8(ascii: "u") {
            guard escape.count == 6 else { return .open }
            guard let unit = UInt16(String(decoding: escape[2...], as: UTF8.self), radix: 16) else { return .malformed }
            add(unit)
        } else {
            guard let character = Self.escaped(byte) else { return .malformed }
            endHalf()
            bytes.append(character)
        }
        escape = []
        return .open
    }

    /// The character that a letter after a backslash stands for.
    private static func escaped(_ letter: UInt8) -> UInt8? {
        switch letter {
        case UInt8(ascii: "\""), UInt8(ascii: "\\"), UInt8(ascii: "/"): letter
        case UInt8(ascii: "b"): 0x08
        case UInt8(ascii: "f"): 0x0C
        case UInt8(ascii: "n"): 0x0A
        case UInt8(ascii: "r"): 0x0D
        case UInt8(ascii: "t"): 0x09
        default: nil
        }
    }

    private mutating func add(_ unit: UInt16) {
        if let first = high, UTF16.isTrailSurrogate(unit) {
            high = nil
            bytes += String(decoding: [first, unit], as: UTF16.self).utf8
        } else if UTF16.isLeadSurrogate(unit) {
            endHalf()
            high = unit
        } else {
            endHalf()
            bytes += String(decoding: [unit], as: UTF16.self).utf8
        }
    }

    /// A first half whose second half does not come is a mark for what is missing.
    private mutating func endHalf() {
        guard high != nil else { return }
        high = nil
        bytes += "\u{FFFD}".utf8
    }
}
