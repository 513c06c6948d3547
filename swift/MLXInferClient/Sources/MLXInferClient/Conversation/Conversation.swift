#if canImport(Observation)
    import Observation

    /// A conversation that a view shows: its messages, the answer that is being written, and what went wrong.
    ///
    /// ```swift
    /// @State private var conversation = Conversation()
    /// ...
    /// conversation.send("What is the capital of France?")
    /// ```
    ///
    /// One answer is written at a time: what asks for another stops it first. A conversation that nobody holds any more stops its answer.
    @MainActor @Observable
    public final class Conversation {
        /// The server, and its model.
        public var client: Client
        /// What every answer is asked for with: model, options, tools. Its messages are the conversation.
        public var request: ChatRequest
        /// The tools that run here when the model calls them. Calls of other tools end the answer; send their results as messages.
        public var tools: [CallableTool] = []
        /// How the tools are run.
        public var toolPolicy = ToolPolicy()
        /// The answer that is being written; nil while none is.
        public private(set) var answer: ChatResponse?
        /// What went wrong with the last answer; not that it was stopped.
        public private(set) var failure: MLXInferError?
        /// What the last answer that came to its end has cost.
        public private(set) var usage: Usage?
        @ObservationIgnored private var task: Task<Void, Never>?

        /// - Parameter request: What stands before the first message, such as instructions, and how answers are to be made.
        public init(_ client: Client = Client(), request: ChatRequest = ChatRequest([])) {
            self.client = client
            self.request = request
        }

        deinit { task?.cancel() }

        /// The conversation so far, without the answer that is being written.
        public var messages: [Message] { request.messages }

        public var isAnswering: Bool { answer != nil }

        /// Adds a message of the user's and asks for an answer.
        public func send(_ text: String) { send([.user(text)]) }

        /// Adds a message of the user's with pictures before its text, and asks for an answer.
        public func send(_ text: String, _ attachments: [ContentPart]) {
            send([.user(attachments + (text.isEmpty ? [] : [.text(text)]))])
        }

        /// Adds messages, such as the results of tools, and asks for an answer.
        public func send(_ messages: [Message]) {
            stop()
            request.messages += messages
            ask()
        }

        /// Ends the answer that is being written. What had come stays, as a message.
        public func stop() {
            guard let answer else { return }
            task?.cancel()
            keep(answer)
        }

        /// Asks for the last answer once more, after a failure or where it did not please.
        public func retry() {
            stop()
            while request.messages.last?.role == .assistant { request.messages.removeLast() }
            if request.messages.contains(where: { $0.role != .system }) { ask() }
        }

        /// Replaces the text of a message, drops all that came after it, and asks for an answer.
        public func edit(_ index: Int, _ text: String) {
            stop()
            guard request.messages.indices.contains(index) else { return }
            request.messages.removeSubrange((index + 1)...)
            request.messages[index].content = text
            ask()
        }

        /// Returns once no answer is being written.
        public func settled() async {
            while isAnswering, let task { await task.value }
        }

        private func ask() {
            (answer, failure) = (ChatResponse(), nil)
            let events = client.chat(request, calling: tools, policy: toolPolicy)
            task = Task { [weak self] in
                do {
                    for try await event in events {
                        guard let self, !Task.isCancelled else { return }
                        add(event)
                    }
                    self?.finish(nil)
                } catch {
                    self?.finish(error)
                }
            }
        }

        private func add(_ event: ToolEvent) {
            switch event {
            case .answer(let event): answer?.add(event)
            case .calling: break
            case .called(let results):
                if let answer { request.messages.append(answer.message) }
                request.messages += results.map(\.message)
                answer = ChatResponse()
            }
        }

        private func finish(_ error: (any Error)?) {
            guard !Task.isCancelled, let answer else { return }
            failure = error.map { MLXInferError($0) }
            if error == nil { usage = answer.usage }
            keep(answer)
        }

        private func keep(_ answer: ChatResponse) {
            self.answer = nil
            var answer = answer
            // Calls that are not whole cannot be sent back, nor those that have no results.
            if answer.finishReason == nil || !tools.isEmpty { answer.toolCalls = [] }
            if !answer.text.isEmpty || !answer.toolCalls.isEmpty || !answer.reasoning.isEmpty { request.messages.append(answer.message) }
        }
    }
#endif
