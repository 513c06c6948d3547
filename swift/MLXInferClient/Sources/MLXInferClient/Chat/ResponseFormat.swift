/// What form an answer must have.
public enum ResponseFormat: Sendable, Hashable {
    case text
    /// Any JSON object.
    case jsonObject
    /// JSON that a schema describes.
    case jsonSchema(name: String, schema: JSONValue, strict: Bool = true)

    var json: JSONValue {
        switch self {
        case .text: ["type": "text"]
        case .jsonObject: ["type": "json_object"]
        case .jsonSchema(let name, let schema, let strict):
            ["type": "json_schema", "json_schema": ["name": .string(name), "schema": schema, "strict": .bool(strict)]]
        }
    }
}
