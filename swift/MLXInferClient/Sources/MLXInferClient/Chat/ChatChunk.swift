/// A `chat.completion.chunk` as it comes; fields that are not named here are ignored.
struct ChatChunk: AnswerChunk {
    struct Choice: AnswerChoice {
        var index: Int?
        var delta: Delta?
        var logprobs: Logprobs?
        var finish: FinishReason?

        enum CodingKeys: String, CodingKey {
            case index, delta, logprobs
            case finish = "finish_reason"
        }
    }

    struct Delta: Decodable {
        var content: String?
        var reasoningContent: String?
        var reasoning: String?
        var calls: [Call]?

        enum CodingKeys: String, CodingKey {
            case content, reasoning
            case reasoningContent = "reasoning_content"
            case calls = "tool_calls"
        }
    }

    struct Call: Decodable {
        struct Function: Decodable {
            var name: String?
            var arguments: String?
        }

        var index: Int?
        var id: String?
        var function: Function?
    }

    struct Logprobs: Decodable {
        var content: [TokenLogprob]?
    }

    var id: String?
    var model: String?
    var choices: [Choice]?
    var usage: Usage?
    var error: JSONValue?
}

extension ChatChunk.Choice {
    var text: String? { delta?.content }
    var reasoning: String? { delta?.reasoningContent ?? delta?.reasoning }
    var tokens: [TokenLogprob]? { logprobs?.content }
    var calls: [ToolCallDelta] {
        (delta?.calls ?? []).enumerated().map { place, call in
            let (name, arguments) = (call.function?.name, call.function?.arguments ?? "")
            return ToolCallDelta(index: call.index ?? place, id: call.id, name: name, arguments: arguments)
        }
    }
}
