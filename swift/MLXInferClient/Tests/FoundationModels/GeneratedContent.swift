import Foundation

/// Identifies one generated value while its snapshots arrive.
public struct GenerationID: Sendable, Hashable {
    private let id = UUID()
    public init() {}
}

/// A JSON value that a model wrote.
public struct GeneratedContent: Sendable, Equatable {
    public enum Kind: Equatable, Sendable {
        case null
        case bool(Bool)
        case number(Double)
        case string(String)
        case array([GeneratedContent])
        case structure(properties: [String: GeneratedContent], orderedKeys: [String])
    }

    public struct ParsingError: LocalizedError, Sendable {
        public var rawContent: String
        public var underlyingError: (any Error)?
        public var debugDescription: String

        public init(rawContent: String, underlyingError: (any Error)? = nil, debugDescription: String) {
            (self.rawContent, self.underlyingError, self.debugDescription) = (rawContent, underlyingError, debugDescription)
        }
    }

    public var id: GenerationID?
    public let kind: Kind
    public var isComplete: Bool { true }

    public init(kind: Kind, id: GenerationID? = nil) { (self.kind, self.id) = (kind, id) }

    public init(_ value: some ConvertibleToGeneratedContent) { self = value.generatedContent }

    public init(properties: KeyValuePairs<String, any ConvertibleToGeneratedContent>, id: GenerationID? = nil) {
        let values = properties.map { ($0.key, $0.value.generatedContent) }
        self.init(kind: .structure(properties: Dictionary(values) { $1 }, orderedKeys: properties.map(\.key)), id: id)
    }

    public init(elements: some Sequence<any ConvertibleToGeneratedContent>, id: GenerationID? = nil) {
        self.init(kind: .array(elements.map(\.generatedContent)), id: id)
    }

    public init(json: String) throws {
        do {
            self = try JSONDecoder().decode(GeneratedContent.self, from: Data(json.utf8))
        } catch {
            throw ParsingError(rawContent: json, underlyingError: error, debugDescription: "not JSON")
        }
    }

    /// Members in the order of the value.
    public var jsonString: String {
        switch kind {
        case .null: return "null"
        case .bool(let value): return String(value)
        case .number(let value): return value == value.rounded() && abs(value) < 1e15 ? String(Int(value)) : String(value)
        case .string(let text): return Self.quoted(text)
        case .array(let elements): return "[\(elements.map(\.jsonString).joined(separator: ", "))]"
        case .structure(let properties, let keys):
            return "{\(keys.map { "\(Self.quoted($0)): \(properties[$0]?.jsonString ?? "null")" }.joined(separator: ", "))}"
        }
    }

    private static func quoted(_ text: String) -> String {
        let encoder = JSONEncoder()
        encoder.outputFormatting = .withoutEscapingSlashes
        return (try? encoder.encode(text)).map { String(decoding: $0, as: UTF8.self) } ?? "\"\""
    }

    public func value<Value: ConvertibleFromGeneratedContent>(_ type: Value.Type = Value.self) throws -> Value { try Value(self) }

    public func value<Value: ConvertibleFromGeneratedContent>(
        _ type: Value.Type = Value.self, forProperty property: String
    ) throws -> Value {
        guard case .structure(let properties, _) = kind, let found = properties[property] else { throw missing(property) }
        return try Value(found)
    }

    private func missing(_ property: String) -> ParsingError {
        ParsingError(rawContent: jsonString, debugDescription: "no property \(property)")
    }
}

extension GeneratedContent: Codable {
    private struct Name: CodingKey {
        let stringValue: String
        var intValue: Int? { nil }
        init?(stringValue: String) { self.stringValue = stringValue }
        init?(intValue: Int) { nil }
    }

    public init(from decoder: any Decoder) throws {
        if let object = try? decoder.container(keyedBy: Name.self) {
            let values = try object.allKeys.map { ($0.stringValue, try object.decode(GeneratedContent.self, forKey: $0)) }
            self.init(kind: .structure(properties: Dictionary(values) { $1 }, orderedKeys: values.map(\.0).sorted()))
        } else if var array = try? decoder.unkeyedContainer() {
            var elements: [GeneratedContent] = []
            while !array.isAtEnd { elements.append(try array.decode(GeneratedContent.self)) }
            self.init(kind: .array(elements))
        } else {
            let value = try decoder.singleValueContainer()
            if value.decodeNil() {
                self.init(kind: .null)
            } else if let bool = try? value.decode(Bool.self) {
                self.init(kind: .bool(bool))
            } else if let number = try? value.decode(Double.self) {
                self.init(kind: .number(number))
            } else {
                self.init(kind: .string(try value.decode(String.self)))
            }
        }
    }

    public func encode(to encoder: any Encoder) throws {
        switch kind {
        case .structure(let properties, let keys):
            var object = encoder.container(keyedBy: Name.self)
            for key in keys { if let name = Name(stringValue: key) { try object.encode(properties[key], forKey: name) } }
        case .array(let elements):
            var array = encoder.unkeyedContainer()
            for element in elements { try array.encode(element) }
        case .null: try encodeScalar { try $0.encodeNil() }
        case .bool(let value): try encodeScalar { try $0.encode(value) }
        case .number(let value): try encodeScalar { try value == value.rounded() ? $0.encode(Int(value)) : $0.encode(value) }
        case .string(let text): try encodeScalar { try $0.encode(text) }
        }

        func encodeScalar(_ write: (inout any SingleValueEncodingContainer) throws -> Void) throws {
            var value = encoder.singleValueContainer()
            try write(&value)
        }
    }
}
