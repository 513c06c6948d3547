/// A model that the server has.
public struct Model: Sendable, Hashable, Identifiable, Decodable {
    /// The name that requests use.
    public var id: String
    /// The most tokens of a prompt and its answer together, where the server says it.
    public var maxTokens: Int?

    public init(id: String, maxTokens: Int? = nil) { (self.id, self.maxTokens) = (id, maxTokens) }

    private enum CodingKeys: String, CodingKey {
        case id
        case maxTokens = "max_model_len"
    }
}

struct ModelList: Decodable {
    var data: [Model]
}

/// What the server says of itself.
public struct Health: Sendable, Hashable, Decodable {
    /// `ok` once every model is loaded.
    public var status: String
    public var version: String?
    /// The names of its models.
    public var models: [String]?

    public var isReady: Bool { status == "ok" }

    public init(status: String, version: String? = nil, models: [String]? = nil) {
        (self.status, self.version, self.models) = (status, version, models)
    }
}
