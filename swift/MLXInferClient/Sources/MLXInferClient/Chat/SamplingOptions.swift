/// How tokens are chosen and when an answer ends. What is nil is left to the model's own defaults.
public struct SamplingOptions: Sendable, Hashable {
    /// The most tokens of an answer. A chat of 0 tokens has its prompt read into the server's prefix cache, for a later request with the
    /// same start.
    public var maxTokens: Int?
    /// 0 takes the likeliest token each time.
    public var temperature: Double?
    public var topP: Double?
    public var topK: Int?
    public var minP: Double?
    /// The same seed and request give the same answer.
    public var seed: Int?
    /// Texts at which an answer ends; they are not part of it.
    public var stop: [String] = []
    public var presencePenalty: Double?
    public var frequencyPenalty: Double?
    public var repetitionPenalty: Double?
    /// Added to the logits, by token id.
    public var logitBias: [Int: Double] = [:]
    /// Asks for the log-probability of each token, and of so many others at its place.
    public var topLogprobs: Int?
    /// Who asks, for the server's fairness between users.
    public var user: String?

    public init(
        maxTokens: Int? = nil, temperature: Double? = nil, topP: Double? = nil, topK: Int? = nil, minP: Double? = nil, seed: Int? = nil,
        stop: [String] = [], presencePenalty: Double? = nil, frequencyPenalty: Double? = nil, repetitionPenalty: Double? = nil,
        logitBias: [Int: Double] = [:], topLogprobs: Int? = nil, user: String? = nil
    ) {
        (self.maxTokens, self.temperature, self.topP, self.topK, self.minP) = (maxTokens, temperature, topP, topK, minP)
        (self.seed, self.stop, self.logitBias, self.topLogprobs, self.user) = (seed, stop, logitBias, topLogprobs, user)
        (self.presencePenalty, self.frequencyPenalty) = (presencePenalty, frequencyPenalty)
        self.repetitionPenalty = repetitionPenalty
    }

    /// Adds the fields that chats and completions share.
    func add(to object: inout JSONObject) {
        object["max_tokens"] = maxTokens.map { .integer($0) }
        object["temperature"] = temperature.map { .number($0) }
        object["top_p"] = topP.map { .number($0) }
        object["top_k"] = topK.map { .integer($0) }
        object["min_p"] = minP.map { .number($0) }
        object["seed"] = seed.map { .integer($0) }
        object["stop"] = stop.isEmpty ? nil : .array(stop.map { .string($0) })
        object["presence_penalty"] = presencePenalty.map { .number($0) }
        object["frequency_penalty"] = frequencyPenalty.map { .number($0) }
        object["repetition_penalty"] = repetitionPenalty.map { .number($0) }
        object["user"] = user.map { .string($0) }
        let bias = logitBias.sorted { $0.key < $1.key }.map { (String($0.key), JSONValue.number($0.value)) }
        object["logit_bias"] = bias.isEmpty ? nil : .object(JSONObject(bias))
    }
}
