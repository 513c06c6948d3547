/// What a request has cost, in tokens.
public struct Usage: Sendable, Hashable {
    public var promptTokens: Int
    public var completionTokens: Int
    /// Of the prompt's tokens, those that did not have to be computed again.
    public var cachedTokens: Int
    /// Of the prompt's tokens, those of its pictures.
    public var imageTokens: Int
    /// Of the answer's tokens, those of the reasoning.
    public var reasoningTokens: Int

    public init(promptTokens: Int, completionTokens: Int, cachedTokens: Int = 0, imageTokens: Int = 0, reasoningTokens: Int = 0) {
        (self.promptTokens, self.completionTokens, self.reasoningTokens) = (promptTokens, completionTokens, reasoningTokens)
        (self.cachedTokens, self.imageTokens) = (cachedTokens, imageTokens)
    }
}

extension Usage: Decodable {
    private enum Fields: String, CodingKey {
        case prompt = "prompt_tokens"
        case completion = "completion_tokens"
        case details = "prompt_tokens_details"
        case answer = "completion_tokens_details"
    }

    private struct AnswerDetails: Decodable {
        var reasoning: Int?
        enum CodingKeys: String, CodingKey { case reasoning = "reasoning_tokens" }
    }

    private struct Details: Decodable {
        var cached: Int?
        var image: Int?
        enum CodingKeys: String, CodingKey {
            case cached = "cached_tokens"
            case image = "image_tokens"
        }
    }

    public init(from decoder: any Decoder) throws {
        let fields = try decoder.container(keyedBy: Fields.self)
        promptTokens = try fields.decodeIfPresent(Int.self, forKey: .prompt) ?? 0
        completionTokens = try fields.decodeIfPresent(Int.self, forKey: .completion) ?? 0
        let details = try fields.decodeIfPresent(Details.self, forKey: .details)
        (cachedTokens, imageTokens) = (details?.cached ?? 0, details?.image ?? 0)
        reasoningTokens = try fields.decodeIfPresent(AnswerDetails.self, forKey: .answer)?.reasoning ?? 0
    }
}
