/// A property in JSON: its name, its place in the type, and its schema.
public struct Property<Root>: Sendable {
    /// The name in JSON, as the type's `CodingKeys` have it.
    public let name: String
    /// False for optional properties, which the model may leave out.
    public let isRequired: Bool
    let path: any PartialKeyPath<Root> & Sendable
    private let makeSchema: @Sendable () -> JSONSchema

    public var schema: JSONSchema { makeSchema() }

    /// - Parameters:
    ///   - schema: A narrower schema than that of the type, such as a text with a length.
    ///   - description: A sentence about the value, for the model.
    public init<Value: JSONSchemaProviding>(
        _ name: String, _ path: any KeyPath<Root, Value> & Sendable, _ schema: JSONSchema? = nil, _ description: String? = nil
    ) {
        (self.name, self.path, isRequired) = (name, path, true)
        makeSchema = { Self.schema(schema ?? Value.jsonSchema, description) }
    }

    /// A property that the model may leave out.
    public init<Value: JSONSchemaProviding>(
        _ name: String, _ path: any KeyPath<Root, Value?> & Sendable, _ schema: JSONSchema? = nil, _ description: String? = nil
    ) {
        (self.name, self.path, isRequired) = (name, path, false)
        makeSchema = { Self.schema(schema ?? Value.jsonSchema, description) }
    }

    private static func schema(_ schema: JSONSchema, _ description: String?) -> JSONSchema {
        description.map(schema.described) ?? schema
    }
}

/// Lists the properties of a ``GuidedObject``.
@resultBuilder
public enum SchemaBuilder<Root> {
    public static func buildExpression(_ property: Property<Root>) -> [Property<Root>] { [property] }
    public static func buildBlock(_ parts: [Property<Root>]...) -> [Property<Root>] { parts.flatMap { $0 } }
    public static func buildOptional(_ part: [Property<Root>]?) -> [Property<Root>] { part ?? [] }
    public static func buildEither(first part: [Property<Root>]) -> [Property<Root>] { part }
    public static func buildEither(second part: [Property<Root>]) -> [Property<Root>] { part }
    public static func buildArray(_ parts: [[Property<Root>]]) -> [Property<Root>] { parts.flatMap { $0 } }
}
