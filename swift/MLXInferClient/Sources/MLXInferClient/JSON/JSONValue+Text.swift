/// A number that JSON cannot express.
struct NotJSON: Error, Equatable {
    let number: Double
}

extension JSONValue {
    /// The value as UTF-8 JSON, without spaces, members in their order.
    ///
    /// Foundation's encoder is not used for it, because it forgets the order of members.
    ///
    /// - Throws: ``MLXInferError/invalidRequest(_:)`` where a number is infinite or not a number.
    public func encoded() throws -> [UInt8] {
        var bytes: [UInt8] = []
        do {
            try write(to: &bytes)
        } catch let failure as NotJSON {
            throw MLXInferError.invalidRequest("JSON cannot express the number \(failure.number)")
        }
        return bytes
    }

    private func write(to bytes: inout [UInt8]) throws {
        switch self {
        case .null: bytes += "null".utf8
        case .bool(let value): bytes += (value ? "true" : "false").utf8
        case .integer(let value): bytes += String(value).utf8
        case .number(let value):
            guard value.isFinite else { throw NotJSON(number: value) }
            bytes += String(value).utf8
        case .string(let text): Self.write(text, to: &bytes)
        case .array(let elements):
            try Self.write(elements, between: ("[", "]"), to: &bytes) { try $0.write(to: &$1) }
        case .object(let object):
            try Self.write(object.members, between: ("{", "}"), to: &bytes) { member, bytes in
                Self.write(member.key, to: &bytes)
                bytes.append(UInt8(ascii: ":"))
                try member.value.write(to: &bytes)
            }
        }
    }

    private static func write<Item>(
        _ items: [Item], between marks: (String, String), to bytes: inout [UInt8], each: (Item, inout [UInt8]) throws -> Void
    ) rethrows {
        bytes += marks.0.utf8
        for (index, item) in items.enumerated() {
            if index > 0 { bytes.append(UInt8(ascii: ",")) }
            try each(item, &bytes)
        }
        bytes += marks.1.utf8
    }

    private static func write(_ text: String, to bytes: inout [UInt8]) {
        let hex = Array("0123456789abcdef".utf8)
        bytes.append(UInt8(ascii: "\""))
        for byte in text.utf8 {
            switch byte {
            case UInt8(ascii: "\""), UInt8(ascii: "\\"): bytes += [UInt8(ascii: "\\"), byte]
            case 0x0A: bytes += "\\n".utf8
            case 0x0D: bytes += "\\r".utf8
            case 0x09: bytes += "\\t".utf8
            case 0..<0x20: bytes += "\\u00".utf8 + [hex[Int(byte >> 4)], hex[Int(byte & 15)]]
            default: bytes.append(byte)
            }
        }
        bytes.append(UInt8(ascii: "\""))
    }
}

extension JSONValue: CustomStringConvertible {
    /// The value as JSON text.
    public var description: String {
        (try? encoded()).map { String(decoding: $0, as: UTF8.self) } ?? "not expressible as JSON"
    }
}
