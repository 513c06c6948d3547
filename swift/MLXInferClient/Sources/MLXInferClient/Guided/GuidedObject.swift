/// A type whose properties a model fills.
///
/// ```swift
/// struct Trip: GuidedObject, Decodable, Sendable {
///     let city: String
///     let days: Int
///     let notes: [String]?
///
///     static var properties: [Property<Trip>] {
///         Property("city", \.city, .string(maxLength: 40))
///         Property("days", \.days, .integer(in: 1...14))
///         Property("notes", \.notes, .array(of: .string(maxLength: 80), count: 0...3), "What to pack")
///     }
/// }
/// ```
///
/// Its snapshots are ``PartialObject``: the same properties, each of them optional.
public protocol GuidedObject: JSONSchemaProviding {
    associatedtype PartiallyGenerated = PartialObject<Self>

    /// The properties in the order in which the model writes them.
    @SchemaBuilder<Self> static var properties: [Property<Self>] { get }
}

extension GuidedObject {
    /// An object with the properties. A type that contains itself is a definition, to which its properties refer.
    public static var jsonSchema: JSONSchema { OpenSchemas.schema(of: Self.self) }
}

extension GuidedObject where PartiallyGenerated == PartialObject<Self> {
    public static func partiallyGenerated(from json: PartialJSONValue) -> PartialObject<Self>? {
        json.value.object == nil ? nil : PartialObject(json: json)
    }
}
