import AnyLanguageModel
import MLXInferClient

/// A model of `mlxinfer serve` for the sessions of AnyLanguageModel.
public struct MLXInferLanguageModel: LanguageModel {
    public typealias UnavailableReason = Never

    /// Settings that `GenerationOptions` has no names for.
    public struct CustomGenerationOptions: AnyLanguageModel.CustomGenerationOptions {
        /// Values here win over those of the session.
        public var sampling: SamplingOptions
        /// "none", "low", "medium" or "high"; nil leaves it to the model.
        public var reasoningEffort: String?
        public var toolChoice: ToolChoice?

        public init(sampling: SamplingOptions = SamplingOptions(), reasoningEffort: String? = nil, toolChoice: ToolChoice? = nil) {
            (self.sampling, self.reasoningEffort, self.toolChoice) = (sampling, reasoningEffort, toolChoice)
        }
    }

    public let client: Client
    /// How often the model may call tools before it answers.
    public let maxToolRounds: Int

    /// - Parameter model: The name that the server lists; nil is the first model that the server has.
    public init(
        model: String? = nil, endpoint: Endpoint = .default, timeouts: Timeouts = Timeouts(), reconnect: Reconnect = Reconnect(),
        maxToolRounds: Int = 8
    ) {
        client = Client(endpoint, model: model, timeouts: timeouts, reconnect: reconnect)
        self.maxToolRounds = maxToolRounds
    }

    /// Has the server load the model and read the start of the conversation into its prefix cache. Failures are not reported.
    public func prewarm(for session: LanguageModelSession, promptPrefix: Prompt?) {
        guard var request = try? ChatRequest(session, nil, isDescribed: false, GenerationOptions()) else { return }
        request.messages.append(.user(promptPrefix.map { "\($0.description)" } ?? ""))
        request.options = SamplingOptions(maxTokens: 0)
        Task(priority: .utility) { [client, request] in _ = try? await client.respond(to: request) }
    }

    /// - Throws: `GenerationError`, `ToolCallError`, `MLXInferError` for what they have no case for, and `CancellationError`.
    public func respond<Content: Generable>(
        within session: LanguageModelSession, to prompt: Prompt, generating type: Content.Type, includeSchemaInPrompt: Bool,
        options: GenerationOptions
    ) async throws -> LanguageModelSession.Response<Content> {
        let request = try ChatRequest(session, Self.schema(of: type), isDescribed: includeSchemaInPrompt, options)
        var answer = SessionAnswer()
        var raw = type == String.self ? GeneratedContent("") : GeneratedContent(properties: [:])
        do {
            try await answer.run(request, client, session, maxRounds: maxToolRounds) { _ in }
            raw = try answer.content(as: type)
        } catch is StoppedByDelegate {
            // the calls are in the transcript, and the answer is empty
        } catch {
            throw generationError(error)
        }
        return .init(content: try Content(raw), rawContent: raw, transcriptEntries: ArraySlice(answer.entries))
    }

    public func streamResponse<Content: Generable>(
        within session: LanguageModelSession, to prompt: Prompt, generating type: Content.Type, includeSchemaInPrompt: Bool,
        options: GenerationOptions
    ) -> sending LanguageModelSession.ResponseStream<Content> {
        let stream = AsyncThrowingStream<LanguageModelSession.ResponseStream<Content>.Snapshot, any Error> { continuation in
            let task = Task { [self] in
                do {
                    let request = try ChatRequest(session, Self.schema(of: type), isDescribed: includeSchemaInPrompt, options)
                    try await write(request, session, type) { continuation.yield($0) }
                    continuation.finish()
                } catch {
                    continuation.finish(throwing: generationError(error))
                }
            }
            continuation.onTermination = { _ in task.cancel() }
        }
        return LanguageModelSession.ResponseStream(stream: stream)
    }

    private func write<Content: Generable>(
        _ request: ChatRequest, _ session: LanguageModelSession, _ type: Content.Type,
        emit: (LanguageModelSession.ResponseStream<Content>.Snapshot) -> Void
    ) async throws {
        var answer = SessionAnswer()
        do {
            try await answer.run(request, client, session, maxRounds: maxToolRounds) { text in
                if let snapshot = snapshot(text, of: type) { emit(snapshot) }
            }
            _ = try answer.content(as: type)
        } catch is StoppedByDelegate {
            // nothing follows the calls
        }
    }

    /// Nil for an answer of text.
    private static func schema(of type: any Generable.Type) -> GenerationSchema? {
        type == String.self ? nil : type.generationSchema
    }
}

/// What a text says so far of a type; nil while that is too little.
private func snapshot<Content: Generable>(
    _ text: String, of type: Content.Type
) -> LanguageModelSession.ResponseStream<Content>.Snapshot? {
    let json = JSONValue(partial: text).map { "\($0)" }
    guard let raw = type == String.self ? GeneratedContent(text) : json.flatMap({ try? GeneratedContent(json: $0) }) else { return nil }
    return (try? Content.PartiallyGenerated(raw)).map { .init(content: $0, rawContent: raw) }
}
