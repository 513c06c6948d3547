/// Texts, and how a model is to turn them into vectors.
public struct EmbeddingRequest: Sendable, Hashable {
    /// What a text is for, where the model treats the two differently.
    public enum Purpose: String, Sendable, Hashable { case query, document }

    public var texts: [String]
    /// One of the names that ``Client/models()`` lists; nil is the client's, or the first that the server has.
    public var model: String?
    /// How many numbers a vector has, where the model lets it be cut; nil is all of them.
    public var dimensions: Int?
    public var purpose: Purpose?

    public init(_ texts: [String], model: String? = nil, dimensions: Int? = nil, purpose: Purpose? = nil) {
        (self.texts, self.model, self.dimensions, self.purpose) = (texts, model, dimensions, purpose)
    }

    func json(model: String) -> JSONValue {
        var object: JSONObject = ["model": .string(model), "input": .array(texts.map { .string($0) }), "encoding_format": "base64"]
        object["dimensions"] = dimensions.map { .integer($0) }
        object["input_type"] = purpose.map { .string($0.rawValue) }
        return .object(object)
    }
}
