/// A text for the model to go on with.
public struct CompletionRequest: Sendable, Hashable {
    public var prompt: String
    /// One of the names that ``Client/models()`` lists; nil is the client's, or the first that the server has.
    public var model: String?
    public var options: SamplingOptions
    /// Lets the answer begin with the prompt.
    public var echo = false
    /// Fields that this package has no name for, put into the body as they are. Answers are read as one (`n` stays 1).
    public var additionalFields: JSONObject = [:]

    public init(_ prompt: String, model: String? = nil, options: SamplingOptions = SamplingOptions()) {
        (self.prompt, self.model, self.options) = (prompt, model, options)
    }

    func json(model: String) -> JSONValue {
        var object: JSONObject = ["model": .string(model), "prompt": .string(prompt)]
        options.add(to: &object)
        object["logprobs"] = options.topLogprobs.map { .integer($0) }
        object["echo"] = echo ? true : nil
        for (key, value) in additionalFields.members { object[key] = value }
        object["stream"] = true
        object["stream_options"] = ["include_usage": true]
        return .object(object)
    }
}
