import Foundation

/// A conversation: it keeps the transcript, asks the model, and runs the tools that the model calls.
public final class LanguageModelSession: @unchecked Sendable {
    public struct Usage: Sendable {
        public typealias Input = LanguageModelExecutorGenerationChannel.Usage.Input
        public typealias Output = LanguageModelExecutorGenerationChannel.Usage.Output

        public var input: Input
        public var output: Output
        public var totalTokenCount: Int { input.totalTokenCount + output.totalTokenCount }

        static let none = Usage(
            input: Input(totalTokenCount: 0, cachedTokenCount: 0), output: Output(totalTokenCount: 0, reasoningTokenCount: 0))

        static func + (left: Usage, right: Usage) -> Usage {
            Usage(
                input: Input(
                    totalTokenCount: left.input.totalTokenCount + right.input.totalTokenCount,
                    cachedTokenCount: left.input.cachedTokenCount + right.input.cachedTokenCount),
                output: Output(
                    totalTokenCount: left.output.totalTokenCount + right.output.totalTokenCount,
                    reasoningTokenCount: left.output.reasoningTokenCount + right.output.reasoningTokenCount))
        }
    }

    public struct Response<Content: Generable> {
        public let content: Content
        public let rawContent: GeneratedContent
        public let transcriptEntries: ArraySlice<Transcript.Entry>
        public let usage: Usage
    }

    public struct ToolCallError: LocalizedError {
        public var tool: any Tool
        public var underlyingError: any Swift.Error
        public init(tool: any Tool, underlyingError: any Swift.Error) { (self.tool, self.underlyingError) = (tool, underlyingError) }
    }

    public enum Error: LocalizedError {
        case concurrentRequests
    }

    /// What one request to the model needs to know.
    struct Turn: Sendable {
        var schema: GenerationSchema?
        var options: GenerationOptions
        var contextOptions: ContextOptions
        var onText: (@Sendable (String) -> Void)?
    }

    private let lock = NSLock()
    private var history: Transcript
    private var spent = Usage.none
    private var busy = false
    private let tools: [any Tool]
    private let model: any LanguageModel

    public init(model: some LanguageModel, tools: [any Tool] = [], transcript: Transcript) {
        (self.model, self.tools, history) = (model, tools, transcript)
    }

    public convenience init(model: some LanguageModel, tools: [any Tool] = [], instructions: String? = nil) {
        let segments = instructions.map { [Transcript.Segment.text(Transcript.TextSegment(content: $0))] } ?? []
        let definitions = tools.map { Transcript.ToolDefinition(tool: $0) }
        let first = Transcript.Entry.instructions(Transcript.Instructions(segments: segments, toolDefinitions: definitions))
        let isEmpty = segments.isEmpty && definitions.isEmpty
        self.init(model: model, tools: tools, transcript: Transcript(entries: isEmpty ? [] : [first]))
    }

    public var transcript: Transcript { lock.withLock { history } }
    public var usage: Usage { lock.withLock { spent } }
    public var isResponding: Bool { lock.withLock { busy } }

    public func prewarm(promptPrefix: Prompt? = nil) {
        var known = transcript
        if let promptPrefix { known.append(.prompt(Transcript.Prompt(segments: promptPrefix.segments))) }
        warm(model, known)
    }

    private func warm<Model: LanguageModel>(_ model: Model, _ transcript: Transcript) {
        (try? Model.Executor(configuration: model.executorConfiguration))?.prewarm(model: model, transcript: transcript)
    }
}

extension LanguageModelSession {
    public func respond(
        to prompt: Prompt, options: GenerationOptions = GenerationOptions(), contextOptions: ContextOptions = ContextOptions()
    ) async throws -> Response<String> {
        try await answer(prompt, Turn(options: options, contextOptions: contextOptions)) { GeneratedContent($0) }
    }

    public func respond(
        to prompt: String, options: GenerationOptions = GenerationOptions(), contextOptions: ContextOptions = ContextOptions()
    ) async throws -> Response<String> {
        try await respond(to: Prompt(prompt), options: options, contextOptions: contextOptions)
    }

    public func respond(
        options: GenerationOptions = GenerationOptions(), contextOptions: ContextOptions = ContextOptions(),
        @PromptBuilder prompt: () throws -> Prompt
    ) async throws -> Response<String> {
        try await respond(to: try prompt(), options: options, contextOptions: contextOptions)
    }

    public func respond(
        to prompt: String, schema: GenerationSchema, options: GenerationOptions = GenerationOptions(),
        contextOptions: ContextOptions = ContextOptions(includeSchemaInPrompt: true)
    ) async throws -> Response<GeneratedContent> {
        let turn = Turn(schema: schema, options: options, contextOptions: contextOptions)
        return try await answer(Prompt(prompt), turn) { try GeneratedContent(json: $0) }
    }

    public func respond<Content: Generable>(
        to prompt: String, generating type: Content.Type = Content.self, options: GenerationOptions = GenerationOptions(),
        contextOptions: ContextOptions = ContextOptions(includeSchemaInPrompt: true)
    ) async throws -> Response<Content> {
        let turn = Turn(schema: Content.generationSchema, options: options, contextOptions: contextOptions)
        return try await answer(Prompt(prompt), turn) { try GeneratedContent(json: $0) }
    }

    public func streamResponse(
        to prompt: String, options: GenerationOptions = GenerationOptions(), contextOptions: ContextOptions = ContextOptions()
    ) -> ResponseStream {
        ResponseStream { [self] emit in
            let turn = Turn(options: options, contextOptions: contextOptions, onText: emit)
            let _: Response<String> = try await answer(Prompt(prompt), turn) { GeneratedContent($0) }
        }
    }

    /// Snapshots of an answer of text.
    public struct ResponseStream: AsyncSequence, Sendable {
        public struct Snapshot: Sendable { public let content: String }

        private let stream: AsyncThrowingStream<Snapshot, any Swift.Error>

        init(_ work: @escaping @Sendable (@escaping @Sendable (String) -> Void) async throws -> Void) {
            stream = AsyncThrowingStream { continuation in
                let task = Task {
                    do {
                        try await work { continuation.yield(Snapshot(content: $0)) }
                        continuation.finish()
                    } catch {
                        continuation.finish(throwing: error)
                    }
                }
                continuation.onTermination = { _ in task.cancel() }
            }
        }

        public func makeAsyncIterator() -> AsyncThrowingStream<Snapshot, any Swift.Error>.AsyncIterator { stream.makeAsyncIterator() }
    }
}

extension LanguageModelSession {
    private func answer<Content: Generable>(
        _ prompt: Prompt, _ turn: Turn, _ read: (String) throws -> GeneratedContent
    ) async throws -> Response<Content> {
        try begin()
        defer { lock.withLock { busy = false } }
        let before = transcript
        do {
            let format = turn.schema.map { Transcript.ResponseFormat(schema: $0) }
            let asked = Transcript.Prompt(
                segments: prompt.segments, options: turn.options, responseFormat: format, contextOptions: turn.contextOptions)
            lock.withLock { history.append(.prompt(asked)) }
            var usage = Usage.none
            while true {
                let written = try await ask(model, turn)
                usage = usage + written.usage
                lock.withLock { history += written.entries }
                let calls = written.calls
                if calls.isEmpty {
                    let content = try read(written.text)
                    lock.withLock { spent = spent + usage }
                    let entries = transcript[before.count...]
                    return Response(
                        content: try Content(content), rawContent: content, transcriptEntries: ArraySlice(entries), usage: usage)
                }
                for call in calls {
                    let output = try await run(call)
                    lock.withLock { history.append(.toolOutput(output)) }
                }
            }
        } catch {
            lock.withLock { history = before }
            throw error
        }
    }

    private func begin() throws {
        try lock.withLock {
            guard !busy else { throw Error.concurrentRequests }
            busy = true
        }
    }

    private func run(_ call: Transcript.ToolCall) async throws -> Transcript.ToolOutput {
        guard let tool = tools.first(where: { $0.name == call.toolName }) else {
            throw GeneratedContent.ParsingError(rawContent: call.toolName, debugDescription: "no such tool")
        }
        do {
            let segments = try await Self.call(tool, call.arguments)
            return Transcript.ToolOutput(id: call.id, toolName: call.toolName, segments: segments)
        } catch {
            throw ToolCallError(tool: tool, underlyingError: error)
        }
    }

    private static func call<Called: Tool>(_ tool: Called, _ arguments: GeneratedContent) async throws -> [Transcript.Segment] {
        try await tool.call(arguments: Called.Arguments(arguments)).promptRepresentation.segments
    }

    private func ask<Model: LanguageModel>(_ model: Model, _ turn: Turn) async throws -> WrittenEntries {
        let executor = try Model.Executor(configuration: model.executorConfiguration)
        let request = LanguageModelExecutorGenerationRequest(
            id: UUID(), transcript: transcript, enabledTools: tools.map { Transcript.ToolDefinition(tool: $0) }, schema: turn.schema,
            generationOptions: turn.options, contextOptions: turn.contextOptions, metadata: [:])
        let channel = LanguageModelExecutorGenerationChannel()
        let generated = Task {
            do {
                try await executor.respond(to: request, model: model, streamingInto: channel)
                channel.finish()
            } catch {
                channel.finish(throwing: error)
            }
        }
        return try await withTaskCancellationHandler {
            var written = WrittenEntries()
            for try await event in channel {
                written.take(event)
                if case .response = event.kind { turn.onText?(written.text) }
            }
            try Task.checkCancellation()
            return try written.finished()
        } onCancel: {
            generated.cancel()
        }
    }
}
