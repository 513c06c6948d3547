extension Client {
    /// How a text goes on, while it is written: the events of a chat, without reasoning and tools.
    public func streamCompletion(_ request: CompletionRequest) -> AnswerEvents<ChatEvent> {
        events("/v1/completions", model: request.model, reader: CompletionStream(), .events()) { request.json(model: $0) }
    }

    /// How a text goes on.
    ///
    /// - Throws: ``MLXInferError``, in ``MLXInferError/streamInterrupted(partial:reason:)`` with the text so far.
    public func complete(_ request: CompletionRequest) async throws -> ChatResponse {
        try await ChatResponse(collecting: streamCompletion(request))
    }

    /// How a text goes on.
    public func complete(_ prompt: String, options: SamplingOptions = SamplingOptions()) async throws -> ChatResponse {
        try await complete(CompletionRequest(prompt, options: options))
    }
}
