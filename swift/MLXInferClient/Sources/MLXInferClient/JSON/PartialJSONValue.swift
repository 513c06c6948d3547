/// A JSON value that is still being written: whole values, and at most one text at the end that grows.
public struct PartialJSONValue: Sendable, Hashable {
    /// The value so far, as if what is open were closed.
    public let value: JSONValue
    /// True if the last text in `value` may still grow.
    public let endsInText: Bool

    /// The value without the text that may still grow; nil if nothing else is there.
    public var whole: JSONValue? { endsInText ? Self.withoutLast(value) : value }

    /// The member of an object; nil if it has not begun.
    public func member(_ name: String) -> PartialJSONValue? {
        guard let object = value.object, let member = object[name] else { return nil }
        return PartialJSONValue(value: member, endsInText: endsInText && object.keys.last == name)
    }

    /// The elements of an array; nil if the value is not an array.
    public var elements: [PartialJSONValue]? {
        guard let array = value.array else { return nil }
        return array.enumerated().map { PartialJSONValue(value: $1, endsInText: endsInText && $0 == array.count - 1) }
    }

    private static func withoutLast(_ value: JSONValue) -> JSONValue? {
        switch value {
        case .array(var elements):
            let last = elements.popLast().flatMap(withoutLast)
            return .array(elements + (last.map { [$0] } ?? []))
        case .object(var members):
            if let name = members.keys.last { members[name] = members[name].flatMap(withoutLast) }
            return .object(members)
        default: return nil
        }
    }

    /// The value as a type of yours; without the text that grows, if the type cannot be made of a part of that text.
    func decoded<Value: Decodable>(as type: Value.Type) -> Value? {
        (try? value.decoded(as: type)) ?? (endsInText ? whole.flatMap { try? $0.decoded(as: type) } : nil)
    }
}

extension JSONValue {
    /// What JSON text says so far, while it is written: what is open is closed, and what is not whole is left out, but for texts.
    ///
    /// Nil where nothing has been said yet, or the text is no JSON.
    public init?(partial text: String) {
        guard let value = PartialJSON(text).value?.value else { return nil }
        self = value
    }
}

extension ChatResponse {
    /// The text so far as a type of yours, for apps that show an answer while it comes.
    ///
    /// Make what comes late optional: nil is returned as long as something is missing that the type needs.
    public func partial<Value: Decodable>(as type: Value.Type = Value.self) -> Value? {
        PartialJSON(text).value?.decoded(as: type)
    }
}

extension ToolCall {
    /// The arguments so far as a type of yours, as ``ChatResponse/partial(as:)``.
    public func partialArguments<Arguments: Decodable>(as type: Arguments.Type = Arguments.self) -> Arguments? {
        PartialJSON(arguments).value?.decoded(as: type)
    }
}
