/// A conversation, and how the next message is to be made.
public struct ChatRequest: Sendable, Hashable {
    public var messages: [Message]
    /// One of the names that ``Client/models()`` lists; nil is the client's, or the first that the server has.
    public var model: String?
    public var options: SamplingOptions
    public var tools: [Tool] = []
    public var toolChoice: ToolChoice?
    /// Whether an answer may have more than one call; nil leaves it to the server.
    public var parallelToolCalls: Bool?
    public var responseFormat: ResponseFormat?
    /// How hard to think before the answer: "none", "low", "medium", "high"; nil leaves it to the model.
    public var reasoningEffort: String?
    /// The most tokens of that thinking.
    public var thinkingBudget: Int?
    /// Fields that this package has no name for, put into the body as they are. Answers are read as one (`n` stays 1).
    public var additionalFields: JSONObject = [:]

    public init(_ messages: [Message], model: String? = nil, options: SamplingOptions = SamplingOptions()) {
        (self.messages, self.model, self.options) = (messages, model, options)
    }

    func json(model: String) -> JSONValue {
        var object: JSONObject = ["model": .string(model), "messages": .array(messages.map(\.json))]
        options.add(to: &object)
        object["logprobs"] = options.topLogprobs.map { _ in true }
        object["top_logprobs"] = options.topLogprobs.map { .integer($0) }
        object["tools"] = tools.isEmpty ? nil : .array(tools.map(\.json))
        object["tool_choice"] = toolChoice?.json
        object["parallel_tool_calls"] = parallelToolCalls.map { .bool($0) }
        object["response_format"] = responseFormat?.json
        object["reasoning_effort"] = reasoningEffort.map { .string($0) }
        object["thinking_token_budget"] = thinkingBudget.map { .integer($0) }
        for (key, value) in additionalFields.members { object[key] = value }
        object["stream"] = true
        object["stream_options"] = ["include_usage": true]
        return .object(object)
    }
}
