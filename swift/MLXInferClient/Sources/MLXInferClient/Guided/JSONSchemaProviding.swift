import Foundation

/// A type whose values a model can write: it gives the schema that constrains the answer.
///
/// Conform to ``GuidedObject`` for a type with properties, and to ``GuidedChoice`` for an enumeration of texts.
public protocol JSONSchemaProviding {
    /// A value of the type while it is written.
    ///
    /// A nested type of this name with optional properties replaces the default; its texts appear when they are whole.
    associatedtype PartiallyGenerated: Sendable = JSONValue

    static var jsonSchema: JSONSchema { get }

    /// A value while it is written; nil while too little is there.
    static func partiallyGenerated(from json: PartialJSONValue) -> PartiallyGenerated?
}

extension JSONSchemaProviding where PartiallyGenerated: Decodable {
    /// The part of the value that cannot change any more, decoded.
    public static func partiallyGenerated(from json: PartialJSONValue) -> PartiallyGenerated? {
        json.whole.flatMap { try? $0.decoded(as: PartiallyGenerated.self) }
    }
}

extension JSONSchemaProviding where PartiallyGenerated == JSONValue {
    public static func partiallyGenerated(from json: PartialJSONValue) -> JSONValue? { json.value }
}

/// An enumeration of texts, one of which the model chooses.
///
/// ```swift
/// enum Season: String, GuidedChoice, Decodable { case spring, summer, autumn, winter }
/// ```
public protocol GuidedChoice: JSONSchemaProviding, CaseIterable, RawRepresentable, Sendable where RawValue == String {
    associatedtype PartiallyGenerated = Self
}

extension GuidedChoice {
    public static var jsonSchema: JSONSchema { .string(oneOf: allCases.map(\.rawValue)) }
}

extension GuidedChoice where PartiallyGenerated == Self {
    /// The case, once its text is whole.
    public static func partiallyGenerated(from json: PartialJSONValue) -> Self? { json.whole?.string.flatMap(Self.init(rawValue:)) }
}

extension String: JSONSchemaProviding {
    public static var jsonSchema: JSONSchema { .string() }

    /// The text so far.
    public static func partiallyGenerated(from json: PartialJSONValue) -> String? { json.value.string }
}

extension Int: JSONSchemaProviding {
    public typealias PartiallyGenerated = Int
    public static var jsonSchema: JSONSchema { .integer() }
}

extension Double: JSONSchemaProviding {
    public typealias PartiallyGenerated = Double
    public static var jsonSchema: JSONSchema { .number() }
}

extension Float: JSONSchemaProviding {
    public typealias PartiallyGenerated = Float
    public static var jsonSchema: JSONSchema { .number() }
}

extension URL: JSONSchemaProviding {
    public typealias PartiallyGenerated = URL
    public static var jsonSchema: JSONSchema { .string(format: "uri") }
}

extension UUID: JSONSchemaProviding {
    public typealias PartiallyGenerated = UUID
    public static var jsonSchema: JSONSchema { .string(format: "uuid") }
}

extension Bool: JSONSchemaProviding {
    public typealias PartiallyGenerated = Bool
    public static var jsonSchema: JSONSchema { .boolean }
}

extension Array: JSONSchemaProviding where Element: JSONSchemaProviding {
    public typealias PartiallyGenerated = [Element.PartiallyGenerated]
    public static var jsonSchema: JSONSchema { .array(of: Element.jsonSchema) }

    /// The elements so far; one that has begun is among them as soon as it has something to show.
    public static func partiallyGenerated(from json: PartialJSONValue) -> PartiallyGenerated? {
        json.elements?.compactMap { Element.partiallyGenerated(from: $0) }
    }
}

extension Dictionary: JSONSchemaProviding where Key == String, Value: JSONSchemaProviding {
    public typealias PartiallyGenerated = [String: Value.PartiallyGenerated]
    public static var jsonSchema: JSONSchema { .dictionary(of: Value.jsonSchema) }

    public static func partiallyGenerated(from json: PartialJSONValue) -> PartiallyGenerated? {
        guard let names = json.value.object?.keys else { return nil }
        let members = names.compactMap { name in
            json.member(name).flatMap { Value.partiallyGenerated(from: $0) }.map { (name, $0) }
        }
        return [String: Value.PartiallyGenerated](uniqueKeysWithValues: members)
    }
}
