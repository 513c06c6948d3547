/// A JSON schema, which constrains an answer or the arguments of a tool.
///
/// Types give one as ``JSONSchemaProviding``. A schema of any other form is a literal:
///
/// ```swift
/// let schema: JSONSchema = ["type": "object", "properties": ["city": ["type": "string"]], "required": ["city"]]
/// ```
public struct JSONSchema: Sendable, Hashable, ExpressibleByDictionaryLiteral {
    /// The schema as it is sent.
    public let json: JSONValue

    public init(_ json: JSONValue) { self.json = json }

    public init(dictionaryLiteral elements: (String, JSONValue)...) { json = .object(JSONObject(elements)) }

    private init(type: String, _ fields: [(String, JSONValue?)]) {
        var object: JSONObject = ["type": .string(type)]
        for (name, value) in fields { object[name] = value }
        json = .object(object)
    }
}

extension JSONSchema {
    /// A text. Small models ramble: give a text a length.
    public static func string(minLength: Int? = nil, maxLength: Int? = nil, pattern: String? = nil, format: String? = nil) -> JSONSchema {
        JSONSchema(
            type: "string",
            [
                ("minLength", minLength.map { .integer($0) }), ("maxLength", maxLength.map { .integer($0) }),
                ("pattern", pattern.map { .string($0) }), ("format", format.map { .string($0) }),
            ])
    }

    /// One of these texts.
    public static func string(oneOf choices: [String]) -> JSONSchema {
        JSONSchema(type: "string", [("enum", .array(choices.map { .string($0) }))])
    }

    public static func integer(in range: ClosedRange<Int>? = nil) -> JSONSchema {
        JSONSchema(
            type: "integer", [("minimum", range.map { .integer($0.lowerBound) }), ("maximum", range.map { .integer($0.upperBound) })])
    }

    public static func number(in range: ClosedRange<Double>? = nil) -> JSONSchema {
        JSONSchema(
            type: "number", [("minimum", range.map { .number($0.lowerBound) }), ("maximum", range.map { .number($0.upperBound) })])
    }

    public static let boolean = JSONSchema(type: "boolean", [])

    /// A list; without a count, a small model may not find its end.
    public static func array(of element: JSONSchema, count: ClosedRange<Int>? = nil) -> JSONSchema {
        JSONSchema(
            type: "array",
            [
                ("items", element.json), ("minItems", count.map { .integer($0.lowerBound) }),
                ("maxItems", count.map { .integer($0.upperBound) }),
            ])
    }

    /// Values by names that the model chooses.
    public static func dictionary(of value: JSONSchema) -> JSONSchema {
        JSONSchema(type: "object", [("additionalProperties", value.json)])
    }

    /// A value that one of these schemas describes.
    public static func anyOf(_ schemas: [JSONSchema]) -> JSONSchema { ["anyOf": .array(schemas.map(\.json))] }

    /// An object with these properties and no others, in their order.
    static func object<Root>(_ properties: [Property<Root>]) -> JSONSchema {
        JSONSchema(
            type: "object",
            [
                ("properties", .object(JSONObject(properties.map { ($0.name, $0.schema.json) }))),
                ("required", .array(properties.filter(\.isRequired).map { .string($0.name) })), ("additionalProperties", false),
            ])
    }

    /// The schema with a sentence about the value, for the model.
    public func described(_ text: String) -> JSONSchema {
        guard var object = json.object else { return self }
        object["description"] = .string(text)
        return JSONSchema(.object(object))
    }
}
