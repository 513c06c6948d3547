import AnyLanguageModel
import MLXInferClient

/// The session's delegate wants no answer after the calls.
struct StoppedByDelegate: Error {}

/// The answer to a session's request, with what the model called before it.
struct SessionAnswer {
    private var response = ChatResponse()
    /// The calls and their results, for the transcript.
    private(set) var entries: [Transcript.Entry] = []

    /// Asks the model, and runs the session's tools, until an answer has no calls.
    ///
    /// - Parameter onText: Takes the text so far, each time that it grows.
    mutating func run(
        _ request: ChatRequest, _ client: Client, _ session: LanguageModelSession, maxRounds: Int, onText: (String) -> Void
    ) async throws {
        let tools = try session.tools.map { try CallableTool($0, session) }
        let policy = ToolPolicy(maxRounds: maxRounds, onFailure: .throw)
        for try await event in client.chat(request, calling: tools, policy: policy) {
            switch event {
            case .answer(let event):
                if case .started = event { response = ChatResponse() }
                response.add(event)
                if case .text = event { onText(response.text) }
            case .calling(let calls):
                let made = calls.map { Transcript.ToolCall($0) }
                entries.append(.toolCalls(Transcript.ToolCalls(made)))
                await session.toolExecutionDelegate?.didGenerateToolCalls(made, in: session)
            case .called(let results):
                entries += results.map { .toolOutput(Transcript.ToolOutput($0)) }
            }
        }
        try Task.checkCancellation()
    }

    /// - Throws: `MLXInferError.undecodableAnswer` if the limit of tokens cut off a call, or an answer of a type, and what the JSON's
    ///   reader throws.
    func content(as type: any Generable.Type) throws -> GeneratedContent {
        if response.finishReason == .length, type != String.self || !response.toolCalls.isEmpty {
            let text = response.toolCalls.last?.arguments ?? response.text
            throw MLXInferError.undecodableAnswer(text: text, reason: "the limit of tokens cut it off")
        }
        return type == String.self ? GeneratedContent(response.text) : try GeneratedContent(json: response.text)
    }
}

extension CallableTool {
    /// A tool of a session. Its arguments fit the schema, since the session decodes them as the tool's own type.
    init(_ tool: any AnyLanguageModel.Tool, _ session: LanguageModelSession) throws {
        let parameters = try JSONValue(encoding: tool.parameters).schemaForRequest()
        self.init(MLXInferClient.Tool(name: tool.name, description: tool.description, parameters: parameters, strict: true)) { call in
            let (made, delegate) = (Transcript.ToolCall(call), session.toolExecutionDelegate)
            do {
                let output: Transcript.ToolOutput
                switch await delegate?.toolCallDecision(for: made, in: session) ?? .execute {
                case .stop: throw StoppedByDelegate()
                case .provideOutput(let segments): output = .init(id: call.id, toolName: call.name, segments: segments)
                case .execute:
                    output = .init(id: call.id, toolName: call.name, segments: [try await segment(of: tool, made.arguments)])
                }
                await delegate?.didExecuteToolCall(made, output: output, in: session)
                return try parts(of: output.segments)
            } catch let stopped as StoppedByDelegate {
                throw stopped
            } catch {
                await delegate?.didFailToolCall(made, error: error, in: session)
                throw LanguageModelSession.ToolCallError(tool: tool, underlyingError: error)
            }
        }
    }
}

/// The result of a tool.
private func segment<Called: AnyLanguageModel.Tool>(of tool: Called, _ arguments: GeneratedContent) async throws -> Transcript.Segment {
    let output = try await tool.call(arguments: Called.Arguments(arguments))
    if let text = output as? String { return .text(.init(content: text)) }
    if let value = output as? any ConvertibleToGeneratedContent {
        return .structure(.init(source: tool.name, content: value.generatedContent))
    }
    return .text(.init(content: "\(output.promptRepresentation.description)"))
}

extension Transcript.ToolCall {
    /// Arguments that are not JSON stay text.
    init(_ call: MLXInferClient.ToolCall) {
        let arguments = (try? GeneratedContent(json: call.arguments)) ?? GeneratedContent(call.arguments)
        self.init(id: call.id, toolName: call.name, arguments: arguments)
    }
}

extension Transcript.ToolOutput {
    fileprivate init(_ result: ToolResult) {
        let segments = result.parts.map { part in
            switch part {
            case .text(let text): Transcript.Segment.text(.init(content: text))
            case .attachment(let data, let mimeType, _): Transcript.Segment.image(.init(data: data, mimeType: mimeType))
            }
        }
        self.init(id: result.call.id, toolName: result.call.name, segments: segments)
    }
}
