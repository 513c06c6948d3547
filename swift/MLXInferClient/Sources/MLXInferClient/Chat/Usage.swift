/// What a request has cost, in tokens.
public struct Usage: Sendable, Hashable {
    public var promptTokens: Int
    public var completionTokens: Int
    /// Of the prompt's tokens, those that did not have to be computed again.
    public var cachedTokens: Int

    public init(promptTokens: Int, completionTokens: Int, cachedTokens: Int = 0) {
        (self.promptTokens, self.completionTokens, self.cachedTokens) = (promptTokens, completionTokens, cachedTokens)
    }
}

extension Usage: Decodable {
    private enum Fields: String, CodingKey {
        case prompt = "prompt_tokens"
        case completion = "completion_tokens"
        case details = "prompt_tokens_details"
    }

    private struct Details: Decodable {
        var cached: Int?
        enum CodingKeys: String, CodingKey { case cached = "cached_tokens" }
    }

    public init(from decoder: any Decoder) throws {
        let fields = try decoder.container(keyedBy: Fields.self)
        promptTokens = try fields.decodeIfPresent(Int.self, forKey: .prompt) ?? 0
        completionTokens = try fields.decodeIfPresent(Int.self, forKey: .completion) ?? 0
        cachedTokens = try fields.decodeIfPresent(Details.self, forKey: .details)?.cached ?? 0
    }
}
