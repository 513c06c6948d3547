/// One thing that happens while an answer comes.
///
/// First ``started(id:model:)``, then what the model writes, then ``finished(_:)`` once, and ``usage(_:)`` last.
public enum ChatEvent: Sendable, Hashable {
    /// The server has begun the answer.
    case started(id: String, model: String)
    /// The next piece of the answer.
    case text(String)
    /// The next piece of what the model thinks before it answers.
    case reasoning(String)
    /// The next piece of a call of a tool.
    case toolCallDelta(ToolCallDelta)
    /// The tokens of the text next to it, where ``SamplingOptions/topLogprobs`` asks for them.
    case logprobs([TokenLogprob])
    /// The answer is complete, and why.
    case finished(FinishReason)
    /// What it has cost.
    case usage(Usage)
}
