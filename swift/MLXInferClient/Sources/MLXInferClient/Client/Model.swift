/// A model that the server has.
public struct Model: Sendable, Hashable, Identifiable {
    /// Whether it can answer at once.
    public enum State: Sendable, Hashable {
        /// It is loaded when a request asks for it.
        case unloaded
        case loading
        case loaded
        /// It could not be loaded, and why; a later request tries again.
        case failed(reason: String)
    }

    /// The name that requests use; that of an adapter is `base:adapter`.
    public var id: String
    /// The most tokens of a prompt and its answer together, where the server says it.
    public var maxTokens: Int?
    /// Nil where the server does not tell.
    public var state: State?
    /// Of an adapter: the model that it is for.
    public var base: String?
    /// True if its messages may have pictures.
    public var seesImages: Bool

    public init(id: String, maxTokens: Int? = nil, state: State? = nil, base: String? = nil, seesImages: Bool = false) {
        (self.id, self.maxTokens, self.state, self.base, self.seesImages) = (id, maxTokens, state, base, seesImages)
    }
}

extension Model: Decodable {
    private enum Fields: String, CodingKey {
        case id, parent, status, capabilities
        case maxTokens = "max_model_len"
    }

    private struct Status: Decodable {
        var value: String
        var failed: Bool?
        var reason: String?

        var state: State? {
            if failed == true { return .failed(reason: reason ?? "no reason given") }
            let known: [String: State] = ["unloaded": .unloaded, "loading": .loading, "loaded": .loaded]
            return known[value]
        }
    }

    public init(from decoder: any Decoder) throws {
        let fields = try decoder.container(keyedBy: Fields.self)
        id = try fields.decode(String.self, forKey: .id)
        base = try fields.decodeIfPresent(String.self, forKey: .parent)
        state = (try? fields.decode(Status.self, forKey: .status))?.state
        seesImages = (try? fields.decode([String].self, forKey: .capabilities))?.contains("vision") ?? false
        // A model that has never been loaded says 0.
        maxTokens = try fields.decodeIfPresent(Int.self, forKey: .maxTokens).flatMap { $0 > 0 ? $0 : nil }
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
