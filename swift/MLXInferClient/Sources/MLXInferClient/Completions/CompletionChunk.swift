/// A `text_completion` chunk as it comes; fields that are not named here are ignored.
struct CompletionChunk: AnswerChunk {
    struct Choice: AnswerChoice {
        var index: Int?
        var text: String?
        var logprobs: Logprobs?
        var finish: FinishReason?

        enum CodingKeys: String, CodingKey {
            case index, text, logprobs
            case finish = "finish_reason"
        }
    }

    /// The older shape of log-probabilities: lists side by side.
    struct Logprobs: Decodable {
        var tokens: [String]?
        var values: [Double?]?
        var top: [[String: Double]?]?

        enum CodingKeys: String, CodingKey {
            case tokens
            case values = "token_logprobs"
            case top = "top_logprobs"
        }

        /// The lists as one. The first token of an echoed prompt has no probability, and is left out.
        var list: [TokenLogprob] {
            zip(tokens ?? [], values ?? []).enumerated().compactMap { place, pair in
                guard let value = pair.1 else { return nil }
                let others = (top.flatMap { $0.indices.contains(place) ? $0[place] : nil } ?? [:]).sorted {
                    ($1.value, $0.key) < ($0.value, $1.key)
                }
                return TokenLogprob(
                    chosen: .init(token: pair.0, logprob: value), top: others.map { .init(token: $0.key, logprob: $0.value) })
            }
        }
    }

    var id: String?
    var model: String?
    var choices: [Choice]?
    var usage: Usage?
    var error: JSONValue?
}

extension CompletionChunk.Choice {
    var tokens: [TokenLogprob]? { logprobs?.list }
}
