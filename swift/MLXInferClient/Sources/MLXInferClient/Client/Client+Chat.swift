extension Client {
    /// The answer to a conversation, while it is written.
    ///
    /// - Returns: Events in the order of ``ChatEvent``. The stream throws ``MLXInferError``; cancelling the task that reads it throws
    ///   `CancellationError`. `typed` has the same events with errors of one type.
    public func chat(_ request: ChatRequest) -> AnswerEvents<ChatEvent> {
        events("/v1/chat/completions", model: request.model, reader: ChatStream(), .events()) { request.json(model: $0) }
    }

    /// The answer to a conversation, while it is written.
    public func chat(_ messages: [Message], options: SamplingOptions = SamplingOptions()) -> AnswerEvents<ChatEvent> {
        chat(ChatRequest(messages, options: options))
    }

    /// The whole answer to a conversation.
    ///
    /// - Throws: ``MLXInferError``, in ``MLXInferError/streamInterrupted(partial:reason:)`` with the text so far.
    public func respond(to request: ChatRequest) async throws -> ChatResponse {
        try await ChatResponse(collecting: chat(request))
    }

    /// The whole answer to a conversation.
    public func respond(to messages: [Message], options: SamplingOptions = SamplingOptions()) async throws -> ChatResponse {
        try await respond(to: ChatRequest(messages, options: options))
    }

    /// The whole answer to one message.
    public func respond(to prompt: String, options: SamplingOptions = SamplingOptions()) async throws -> ChatResponse {
        try await respond(to: [.user(prompt)], options: options)
    }

    /// The answer to a conversation as a type of yours, which the schema describes to the model.
    ///
    /// ```swift
    /// struct Capital: Decodable { let city: String }
    /// let schema: JSONValue = ["type": "object", "properties": ["city": ["type": "string"]], "required": ["city"]]
    /// let capital = try await client.respond(to: request, as: Capital.self, schema: schema)
    /// ```
    ///
    /// - Throws: ``MLXInferError/api(_:)`` from a server that cannot hold answers to a schema,
    ///   ``MLXInferError/undecodableAnswer(text:reason:)`` where the answer is not such a value.
    public func respond<Value: Decodable>(to request: ChatRequest, as type: Value.Type, schema: JSONValue) async throws -> Value {
        var request = request
        request.responseFormat = .jsonSchema(name: ResponseFormat.name(of: type), schema: schema)
        return try await respond(to: request).decoded(as: type)
    }
}

extension ChatResponse {
    /// The answer that a stream's events make.
    ///
    /// - Throws: What the stream throws, and `CancellationError` where the task was cancelled.
    public init(collecting events: AnswerEvents<ChatEvent>) async throws {
        self.init()
        for try await event in events { add(event) }
        if finishReason == nil { try Task.checkCancellation() }
    }
}
