/// An answer, put together from its events.
public struct ChatResponse: Sendable, Hashable {
    public var id = ""
    public var model = ""
    public var text = ""
    public var reasoning = ""
    public var toolCalls: [ToolCall] = []
    public var logprobs: [TokenLogprob] = []
    /// Nil while the answer is not complete.
    public var finishReason: FinishReason?
    public var usage: Usage?
    private var callPlaces: [Int: Int] = [:]

    /// An answer that has not begun.
    public init() {}

    /// Takes the next event of a stream, for apps that show an answer while it comes.
    public mutating func add(_ event: ChatEvent) {
        switch event {
        case .started(let id, let model): (self.id, self.model) = (id, model)
        case .text(let piece): text += piece
        case .reasoning(let piece): reasoning += piece
        case .toolCallDelta(let delta): add(delta)
        case .logprobs(let tokens): logprobs += tokens
        case .finished(let reason): finishReason = reason
        case .usage(let usage): self.usage = usage
        }
    }

    private mutating func add(_ delta: ToolCallDelta) {
        let place = callPlaces[delta.index] ?? toolCalls.count
        if place == toolCalls.count {
            callPlaces[delta.index] = place
            toolCalls.append(ToolCall(id: "", name: "", arguments: ""))
        }
        if let id = delta.id { toolCalls[place].id = id }
        if let name = delta.name { toolCalls[place].name = name }
        toolCalls[place].arguments += delta.arguments
    }

    /// The answer as a message, for the next request of the conversation.
    public var message: Message {
        Message(role: .assistant, content: text, reasoning: reasoning.isEmpty ? nil : reasoning, toolCalls: toolCalls)
    }

    /// The text as a type of yours.
    ///
    /// - Throws: ``MLXInferError/undecodableAnswer(text:reason:)`` where it is not what that type expects, or was cut off.
    public func decoded<Value: Decodable>(as type: Value.Type = Value.self) throws -> Value {
        guard finishReason != .length else {
            throw MLXInferError.undecodableAnswer(text: text, reason: "the limit of tokens cut it off")
        }
        return try decodeAnswer(text, as: type)
    }
}
