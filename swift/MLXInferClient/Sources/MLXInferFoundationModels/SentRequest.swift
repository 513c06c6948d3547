#if canImport(FoundationModels, _version: 2)
    import FoundationModels
    import MLXInferClient

    /// A session's request as the server gets it.
    @available(macOS 27, iOS 27, visionOS 27, *)
    struct SentRequest {
        let chat: ChatRequest
        /// The entry behind each message, for errors.
        let entries: [Transcript.Entry]
        let schemaName: String?

        /// - Throws: `LanguageModelError.unsupportedTranscriptContent` for content that a chat cannot have.
        init(_ request: LanguageModelExecutorGenerationRequest) throws {
            var messages = ChatMessages()
            try messages.add(request.transcript, last: request)
            var chat = ChatRequest(messages.messages)
            chat.options = SamplingOptions(request.generationOptions)
            chat.tools = try request.enabledToolDefinitions.map { try MLXInferClient.Tool($0) }
            chat.toolChoice = chat.tools.isEmpty ? nil : request.generationOptions.toolCallingMode.flatMap { ToolChoice($0) }
            chat.responseFormat = try request.schema.map { try ResponseFormat($0) }
            chat.reasoningEffort = request.contextOptions.reasoningLevel?.effort
            (self.chat, entries, schemaName) = (chat, messages.entries, request.schema?.name)
        }

        /// A request of no tokens with the start of the next prompt; nil if nothing is known of it.
        ///
        /// Templates want a user to speak. So an empty prompt stands for the one to come.
        init?(prefilling transcript: Transcript) throws {
            var messages = ChatMessages()
            try messages.add(transcript, last: nil)
            let definitions = transcript.compactMap { entry in
                if case .instructions(let instructions) = entry { instructions.toolDefinitions } else { nil }
            }
            guard !messages.messages.isEmpty || definitions.contains(where: { !$0.isEmpty }) else { return nil }
            var chat = ChatRequest(messages.messages, options: SamplingOptions(maxTokens: 0))
            if [nil, .system, .assistant].contains(chat.messages.last?.role) { chat.messages.append(.user("")) }
            chat.tools = try definitions.last.map { try $0.map { try MLXInferClient.Tool($0) } } ?? []
            (self.chat, entries, schemaName) = (chat, messages.entries, nil)
        }
    }

    @available(macOS 27, iOS 27, visionOS 27, *)
    extension SamplingOptions {
        /// The filters that a mode does not name are off. The server accepts temperatures up to 2.
        init(_ options: GenerationOptions) {
            self.init(maxTokens: options.maximumResponseTokens, temperature: options.temperature.map { min(max($0, 0), 2) })
            guard let kind = options.samplingMode?.kind else { return }
            if case .greedy = kind { temperature = 0 }
            if case .randomTopK(let count, let seed) = kind {
                (topK, topP, minP) = (max(count, 1), 1, 0)
                self.seed = seed.map { Int(truncatingIfNeeded: $0) }
            }
            if case .randomProbabilityThreshold(let threshold, let seed) = kind {
                self.seed = seed.map { Int(truncatingIfNeeded: $0) }
                if threshold > 0 { (topK, topP, minP) = (0, min(threshold, 1), 0) } else { temperature = 0 }
            }
        }
    }

    @available(macOS 27, iOS 27, visionOS 27, *)
    extension ContextOptions.ReasoningLevel {
        /// One of the server's words; a custom level is sent as it is, such as "none".
        var effort: String {
            if case .light = self { return "low" }
            if case .moderate = self { return "medium" }
            if case .custom(let level) = self { return level }
            return "high"
        }
    }

    @available(macOS 27, iOS 27, visionOS 27, *)
    extension ToolChoice {
        /// Nil leaves the choice to the model.
        init?(_ mode: GenerationOptions.ToolCallingMode) {
            if mode.kind == .required {
                self = .required
            } else if mode.kind == .disallowed {
                self = .none
            } else {
                return nil
            }
        }
    }

    @available(macOS 27, iOS 27, visionOS 27, *)
    extension MLXInferClient.Tool {
        /// A session decodes the arguments as the tool's own type. So they must fit the schema.
        init(_ definition: Transcript.ToolDefinition) throws {
            let parameters = try JSONValue(encoding: definition.parameters).schemaForRequest()
            self.init(name: definition.name, description: definition.description, parameters: parameters, strict: true)
        }
    }

    @available(macOS 27, iOS 27, visionOS 27, *)
    extension ResponseFormat {
        init(_ schema: GenerationSchema) throws {
            let name = schema.name.filter { $0.isASCII && ($0.isLetter || $0.isNumber || $0 == "_" || $0 == "-") }.prefix(64)
            self = .jsonSchema(name: name.isEmpty ? "answer" : String(name), schema: try JSONValue(encoding: schema).schemaForRequest())
        }
    }
#endif
